"""Telling models apart whose caches do not fit each other: ``fingerprint``.

The digest covers the settings of the configuration that the computation goes by, and names, shapes, data types and a
few values of every weight *that takes part*: cheap for models of any size, and the same wherever the weights are and
however the model came by them.

* Adapters (peft's, by their attributes; peft need not be there): a layer's own weights keep the names that they have
  without adapters. Weights and scaling of an adapter count while it is active and switched on; one that is merged is in
  the layer's own weights already.
* Off-loaded weights (accelerate's hooks) are read where they are kept.
* Tensors that stand for others (torchao's, through ``__tensor_flatten__``) count by what they are made of, quantised
  weights with their scales.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_VALUES_PER_PARAMETER = 8
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16)
_PLAIN = (*_PLAIN, torch.int32, torch.int64)


_ASIDE = (
    "architectures", "dtype", "gradient_checkpointing", "id2label", "initializer_range", "label2id", "model_type",
    "pretraining_tp", "problem_type", "quantization_config", "return_dict", "task_specific_params",
    "tie_word_embeddings", "transformers_version", "use_cache",
)  # fmt: skip
"""Entries of a configuration that say what a model is called, how it was trained or what it returns."""


def fingerprint(model: PreTrainedModel) -> str:
    """Hexadecimal digest that tells models apart whose caches do not fit each other.

    The same computation has the same digest: off-loaded or not, with adapters that are switched off or without any.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(_settings(model), sort_keys=True, default=str).encode())
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    # A weight that is used in several places counts once, by its first name.
    once = {id(tensor): (name, tensor) for name, tensor in reversed(list(_weights(model, "", None)))}
    for name, tensor in sorted(once.values(), key=lambda it: it[0]):
        if name in tied:
            continue
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        for part in _parts(tensor):
            digest.update(part)
    return digest.hexdigest()


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    """Configuration values that change what is computed. What is off is left out: later versions add such entries."""
    return {
        name: value
        for name, value in model.config.get_text_config().to_diff_dict().items()
        if value is not None
        and value is not False
        and not name.startswith(("_", "output_"))
        and not name.endswith(("_token_id", "dropout"))
        and name not in _ASIDE
    }


def _weights(module: Any, prefix: str, kept: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of what takes part in a module's computation; adapters' scaling among them.

    ``kept`` finds the tensors of an enclosing module that accelerate has off-loaded: (its prefix, its weights).
    """
    kept = _kept(module, prefix) or kept
    if hasattr(module, "base_layer") and hasattr(module, "disable_adapters"):
        yield from _weights(module.base_layer, prefix, kept)
        for adapter in _active(module):
            scaling = getattr(module, "scaling", {}).get(adapter, 1.0)
            yield f"{prefix}adapter.{adapter}.scaling", torch.tensor(float(scaling), dtype=torch.float64, device="cpu")
            yield from _of_adapter(module, adapter, prefix, kept)
        return
    if hasattr(module, "original_module") and hasattr(module, "modules_to_save"):
        active = [it for it in _active(module) if it in module.modules_to_save]
        chosen = module.modules_to_save[active[0]] if active else module.original_module
        yield from _weights(chosen, prefix, kept)
        return
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield prefix + name, _found(tensor, prefix + name, kept)
    for name, tensor in module._buffers.items():
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, _found(tensor, prefix + name, kept)
    for name, child in module._modules.items():
        if child is not None:
            yield from _weights(child, f"{prefix}{name}.", kept)


def _active(module: Any) -> list[str]:
    """Adapters that a layer adds to its own weights, in the order of their names."""
    if module.disable_adapters:
        return []
    names = getattr(module, "active_adapters", None) or getattr(module, "active_adapter", [])
    merged = getattr(module, "merged_adapters", ())
    return sorted({names} if isinstance(names, str) else set(names) - set(merged))


def _of_adapter(module: nn.Module, adapter: str, prefix: str, kept: Any) -> Iterator[tuple[str, Tensor]]:
    for name, child in module._modules.items():
        if name == "base_layer" or child is None:
            continue
        name = f"{prefix}adapter.{adapter}.{name}"
        for tensors in (child._parameters, child._buffers):
            tensor = tensors.get(adapter)
            if tensor is not None:
                yield name, _found(tensor, name, kept)
        part = child._modules.get(adapter)
        if part is not None:
            yield from _weights(part, f"{name}.", kept)


def _kept(module: Any, prefix: str) -> tuple[str, Any] | None:
    """Where accelerate keeps the weights of a module that it has off-loaded."""
    hook = getattr(module, "_hf_hook", None)
    for it in getattr(hook, "hooks", [hook]):
        if getattr(it, "weights_map", None) is not None:
            return prefix, it.weights_map
    return None


def _found(tensor: Tensor, name: str, kept: Any) -> Tensor:
    if not tensor.is_meta or kept is None:
        return tensor
    prefix, weights = kept
    return weights[name.removeprefix(prefix)]


def _places(count: int) -> Tensor:
    """Evenly spread places of ``count`` values, the first and the last among them; in integers, since float32 counts to
    2^24 only."""
    return torch.arange(_VALUES_PER_PARAMETER, device="cpu") * (count - 1) // (_VALUES_PER_PARAMETER - 1)


def _parts(tensor: Tensor) -> Iterator[bytes]:
    """Bytes that stand for a tensor's values."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        yield f"{type(tensor).__name__} {context!r}".encode()
        for name in names:
            part = getattr(tensor, name)
            yield f"{name} {tuple(part.shape)}".encode()
            yield from _parts(part)
    elif not tensor.is_meta and tensor.numel():
        places = _places(tensor.numel()).to(tensor.device)
        flat = tensor.detach().flatten()
        if flat.dtype not in _PLAIN and not flat.dtype.is_floating_point:
            flat = flat.view(torch.uint8)
        yield flat[places].double().cpu().numpy().tobytes()
    # bitsandbytes keeps scales beside a weight.
    state = getattr(tensor, "quant_state", None)
    for scale in (getattr(tensor, "SCB", None), getattr(state, "absmax", None)):
        if isinstance(scale, Tensor):
            yield from _parts(scale)
