r"""Surrogates: what a second pass would say of an entry, read off the hidden state that made it.

Per full-attention layer and output, one matrix (KVzap, https://arxiv.org/abs/2601.07891, predicts KVzip so)::

    log a_i^(h) = bias_h + sum_c weight_ch x_ic / scale_c

``x_i`` is the input of the layer's attention for token ``i``. A score is a matter of its own token alone: it needs no
other row, is the same chunk by chunk, whole, in a batch or while decoding, and never changes. ``kvpress_prob.fitting``
fits surrogates; one belongs to the very weights that it was fitted to.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvpress_prob.extras import extra
from kvpress_prob.hf import full_attention_layers
from kvpress_prob.hf.files import replacing
from kvpress_prob.hf.fingerprint import fingerprint

Output = Literal["lookup", "reading"]
OUTPUTS: tuple[Output, ...] = ("lookup", "reading")
"""What a surrogate's file predicts, in order."""
FORMAT = 1
_KEY = "kvpress_prob_surrogate"
_TENSORS = {"scale": torch.float32, "weight": torch.float16, "bias": torch.float32}


@dataclass(frozen=True)
class SurrogateHeader:
    """What a surrogate is and where it comes from.

    Attributes
    ----------
    architecture, fingerprint : str
        The model's class and ``hf.fingerprint``.
    hidden_size, kv_heads : int
    layers : list of int
        Indices of the model's full-attention layers.
    predicts : dict of str to str
        Output -> what its scores are the logarithm of.
    transformers : str
        Version that it was fitted with.
    fitted_on : dict
        Texts, windows, tokens and settings.
    held_out : dict
        Figures on windows that were left out.
    """

    architecture: str
    fingerprint: str
    hidden_size: int
    kv_heads: int
    layers: list[int]
    predicts: dict[str, str]
    transformers: str
    fitted_on: dict[str, Any]
    held_out: dict[str, Any]


_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "architecture": ("a name", lambda it: isinstance(it, str) and bool(it)),
    "fingerprint": ("a digest", lambda it: isinstance(it, str) and bool(re.fullmatch("[0-9a-f]{64}", it))),
    "hidden_size": ("an integer >= 1", lambda it: type(it) is int and it >= 1),
    "kv_heads": ("an integer >= 1", lambda it: type(it) is int and it >= 1),
    "layers": ("increasing layer indices", lambda it: _is_increasing(it)),
    "predicts": (
        f"the outputs {OUTPUTS} and their meaning",
        lambda it: isinstance(it, dict) and tuple(it) == OUTPUTS and all(isinstance(said, str) for said in it.values()),
    ),
    "transformers": ("a version", lambda it: isinstance(it, str) and it[:1].isdigit()),
    "fitted_on": ("a mapping", lambda it: isinstance(it, dict)),
    "held_out": ("a mapping", lambda it: isinstance(it, dict)),
}


@dataclass(frozen=True, eq=False, repr=False)
class Surrogate:
    """Linear read-outs of a model's full-attention layers.

    Attributes
    ----------
    header : SurrogateHeader
    scale : Float[Tensor, "layers hidden"]
        float32; what the inputs are divided by.
    weight : Float[Tensor, "layers outputs hidden hkv"]
        float16, of the divided inputs.
    bias : Float[Tensor, "layers outputs hkv"]
        float32.
    """

    header: SurrogateHeader
    scale: Tensor
    weight: Tensor
    bias: Tensor

    def __post_init__(self):
        header = self.header
        layers, outputs = len(header.layers), len(header.predicts)
        shapes = {
            "scale": (layers, header.hidden_size),
            "weight": (layers, outputs, header.hidden_size, header.kv_heads),
            "bias": (layers, outputs, header.kv_heads),
        }
        for name, dtype in _TENSORS.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tuple(tensor.shape) != shapes[name]:
                raise ValueError(
                    f"{name} must be {dtype} of shape {shapes[name]}, got {tensor.dtype} of {tensor.shape}"
                )
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} must be finite, got infinity or NaN")
        if not (self.scale > 0).all():
            raise ValueError(f"scale must be positive, got {float(self.scale.min())}")

    def __repr__(self) -> str:
        digest = hashlib.sha256()
        for name in _TENSORS:
            digest.update(getattr(self, name).cpu().numpy().tobytes())
        return f"Surrogate({self.header.architecture}, {self.header.fingerprint[:8]}, {digest.hexdigest()[:8]})"

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return list(self.header.predicts)

    def log_scores(self, layer: int, hidden_states: Tensor, output: str) -> Tensor:
        """Log-scores [b hkv n], float32, of the tokens whose hidden states [b n hidden] enter a layer's attention.

        Raises
        ------
        ValueError
            For a layer or an output that the surrogate does not know, and hidden states of another width.
        """
        if output not in self.header.predicts:
            raise ValueError(f"output must be one of {self.outputs}, got {output!r}")
        if layer not in self.header.layers:
            raise ValueError(f"layer must be one of the surrogate's {self.header.layers}, got {layer}")
        if hidden_states.shape[-1] != self.header.hidden_size:
            raise ValueError(f"hidden_states must have width {self.header.hidden_size}, got {hidden_states.shape[-1]}")
        row, column, device = self.header.layers.index(layer), self.outputs.index(output), hidden_states.device
        weight = self.weight[row, column].to(device, torch.float32) / self.scale[row].to(device).unsqueeze(-1)
        bias = self.bias[row, column].to(device)
        return (bias + hidden_states.float() @ weight).mT

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise ``ValueError`` unless the surrogate was fitted to the model's own weights and knows its layers."""
        if self.header.architecture != type(model).__name__:
            raise ValueError(
                f"surrogate must be one of {type(model).__name__}, got one of {self.header.architecture} (architecture)"
            )
        if self.header.fingerprint != fingerprint(model):
            raise ValueError(
                "surrogate must be one of this model's weights, got one of other weights (fingerprint): "
                f"kvpress-prob fit --model {model.config.name_or_path or 'MODEL'}"
            )
        layers = full_attention_layers(model)
        if self.header.layers != layers:
            raise ValueError(f"layers must be the model's full-attention layers {layers}, got {self.header.layers}")


def save_surrogate(surrogate: Surrogate, path: str | os.PathLike) -> None:
    """Write a surrogate to a file; an existing one is replaced only when the new one is complete.

    Raises
    ------
    FileNotFoundError
        For a path in a folder that does not exist.
    """
    metadata = {_KEY: json.dumps({"format": FORMAT, **asdict(surrogate.header)})}
    with replacing(Path(path)) as temporary:
        save_file({name: getattr(surrogate, name).contiguous() for name in _TENSORS}, temporary, metadata)


def load_surrogate(path: str | os.PathLike, *, model: PreTrainedModel | None = None) -> Surrogate:
    """Read a surrogate; with ``model``, refuse one that was fitted to another, and put it on the model's device.

    Raises
    ------
    FileNotFoundError
    ValueError
        Naming the file and what is wrong with it.
    """
    try:
        if Path(path).is_dir():
            raise ValueError("path must be a file, got a folder")
        with safe_open(path, framework="pt", device="cpu") as file:
            raw = (file.metadata() or {}).get(_KEY)
            if raw is None:
                raise ValueError("metadata must be a surrogate's, got another file's")
            header = _header(json.loads(raw))
            for name in _TENSORS:
                if name not in file.keys():  # noqa: SIM118  (not a mapping)
                    raise ValueError(f"{name} must be there, got {sorted(file.keys())}")
            surrogate = Surrogate(header, **{name: file.get_tensor(name) for name in _TENSORS})
        if model is not None:
            surrogate.check_model(model)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"'{path}' must be a surrogate that can be used here: {error}") from error
    return surrogate if model is None else _on(surrogate, model.device)


def surrogate_path(model: PreTrainedModel) -> Path:
    """Where ``kvpress-prob fit`` leaves the model's surrogate: the user's cache folder, by fingerprint."""
    with extra("eval", "The default place of surrogates"):
        from platformdirs import user_cache_path
    return user_cache_path("kvpress-prob") / "surrogates" / f"{fingerprint(model)}.safetensors"


def find_surrogate(model: PreTrainedModel) -> Surrogate:
    """The model's surrogate from the user's cache folder, or one that comes with the package.

    Raises
    ------
    ValueError
        If there is none; the message gives the command that fits one.
    """
    cached = surrogate_path(model)
    shipped = Path(str(files("kvpress_prob.sources").joinpath("fitted", cached.name[:16] + cached.suffix)))
    for path in (cached, shipped):
        if path.is_file():
            return load_surrogate(path, model=model)
    name = model.config.name_or_path or "MODEL"
    raise ValueError(
        f"surrogate of {type(model).__name__} {name} must have been fitted before, got none at {cached}: "
        f"kvpress-prob fit --model {name}"
    )


def _on(surrogate: Surrogate, device: torch.device) -> Surrogate:
    return Surrogate(surrogate.header, **{name: getattr(surrogate, name).to(device) for name in _TENSORS})


def _header(described: Any) -> SurrogateHeader:
    """The header of a file, every field checked."""
    if not isinstance(described, dict):
        raise ValueError("metadata must be a mapping")
    form = described.pop("format", None)
    if type(form) is not int or form != FORMAT:
        raise ValueError(f"format must be {FORMAT}, got {form!r}")
    for entry in fields(SurrogateHeader):
        wanted, is_right = _CHECKS[entry.name]
        if entry.name not in described or not is_right(described[entry.name]):
            raise ValueError(f"{entry.name} must be {wanted}, got {described.get(entry.name)!r}")
    return SurrogateHeader(**{entry.name: described[entry.name] for entry in fields(SurrogateHeader)})


def _is_increasing(layers: Any) -> bool:
    whole = isinstance(layers, list) and all(type(it) is int and it >= 0 for it in layers)
    return whole and bool(layers) and layers == sorted(set(layers))
