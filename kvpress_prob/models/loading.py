"""Models by name, inside kvpress' own pipeline."""

from typing import Any, Literal, cast

import torch
from kvpress import KVPressTextGenerationPipeline
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from kvpress_prob.models.demo_model import NAME as DEMO
from kvpress_prob.models.demo_model import demo_model_folder, load_demo_model

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def load_pipeline(
    model: str, *, dtype: Dtype = "auto", device: str | None = None, attn_implementation: str = "sdpa"
) -> KVPressTextGenerationPipeline:
    """kvpress' pipeline around a model.

    Parameters
    ----------
    model : str
        Hub name, folder, or ``smollm2-demo``.
    dtype : str
        "auto" takes the checkpoint's.
    device : str, optional
        Default: the first GPU, or the CPU.
    attn_implementation : str

    Raises
    ------
    ValueError
        If there is no such model or device.
    """
    if device is not None:
        check_device(device)
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # built without it, or none there
            reason = str(error).partition("\n")[0]
            raise ValueError(f"device must be one of this machine, got {device!r}: {reason}") from error
    if model == DEMO:
        own = "float32" if dtype == "auto" else dtype
        loaded, tokenizer = load_demo_model(dtype=own, attn_implementation=attn_implementation)
    else:
        tokenizer = load_tokenizer(model)
        try:
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation=attn_implementation)
        except OSError as error:
            raise ValueError(_not_found(model, error)) from error
    return KVPressTextGenerationPipeline(model=loaded.eval(), tokenizer=cast(Any, tokenizer), device=cast(Any, device))


def check_device(device: Any) -> None:
    """Raise ``ValueError`` unless a model can be told to be there; whether the machine has it shows when loading."""
    try:
        kind = torch.device(device).type if isinstance(device, str) else None
    except RuntimeError:
        kind = None
    if kind in (None, "meta"):
        raise ValueError(f"device must be like 'cpu', 'cuda' or 'cuda:1', got {device!r}")


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of ``model``; ``ValueError`` if there is none."""
    try:
        return AutoTokenizer.from_pretrained(demo_model_folder() if model == DEMO else model)
    except OSError as error:
        raise ValueError(_not_found(model, error)) from error


def _not_found(model: str, error: OSError) -> str:
    return f"model must be '{DEMO}', a Hub name or a folder with a model and a tokenizer, got {model!r}: {error}"
