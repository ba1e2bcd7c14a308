"""What the arguments of a prefill say about its tokens: which are there, where they are, what they are."""

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer


def token_validity(attention_mask: Any, inputs: Tensor) -> Tensor:
    """Validity [b, t] of a prefill's tokens from a mask [b, t], a mask [b or 1, heads, t, t], or a dict of such masks.

    Only left padding is understood. Tokens may see more than the ones before them (images do).
    """
    b, t = inputs.shape[:2]
    if isinstance(attention_mask, dict):
        # What multimodal models hand to their language model: a mask for each kind of layer.
        attention_mask = attention_mask.get("full_attention")
    if attention_mask is None:
        return torch.ones(b, t, dtype=torch.bool, device=inputs.device)
    shape = tuple(getattr(attention_mask, "shape", ()))
    if shape == (b, t):
        valid = attention_mask.bool()
    elif len(shape) == 4 and shape[0] in (1, b) and shape[2:] == (t, t):
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        valid = seen[:, 0, -1].expand(b, t)
        columns = valid[:, None, None]
        causal = torch.ones(t, t, dtype=torch.bool, device=seen.device).tril()
        if (seen & ~columns).any() or (causal & columns & ~seen).any():
            raise NotImplementedError("attention_mask of a prefill must let every token see all valid ones before it")
    else:
        raise NotImplementedError(
            f"attention_mask of a prefill must have shape {(b, t)} or {(b, 1, t, t)}, got {shape or attention_mask}"
        )
    if not valid[:, -1].all() or (valid[:, :-1] & ~valid[:, 1:]).any():
        raise NotImplementedError("attention_mask of a prefill must be left padding: zeros, then ones, in every row")
    return valid


def validity_after(given: dict[str, Any], cache: Any) -> Tensor | None:
    """Validity [b, t] of all tokens after the pass, for layers that are dense so far; None when there is none."""
    if cache is not None and cache.layers and not any(type(layer) is DynamicLayer for layer in cache.layers):
        return None
    ids, embeds, mask = (given.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask"))
    inputs = embeds if ids is None else ids
    b, n = cast(Tensor, inputs).shape[:2]
    t = n + (0 if cache is None else cache.get_seq_length())
    if isinstance(mask, dict):
        mask = mask.get("full_attention")
    if mask is None:
        return torch.ones(b, t, dtype=torch.bool, device="cpu")
    shape = tuple(mask.shape)
    if shape == (b, t):
        valid = mask.bool()
    elif len(shape) == 4 and shape[0] in (1, b) and shape[2:] == (n, t):
        valid = (mask if mask.dtype == torch.bool else mask == 0)[:, 0, -1].expand(b, t)
    else:
        raise NotImplementedError(f"attention_mask must have shape {(b, t)} or {(b, 1, n, t)}, got {shape}")
    if (valid[:, :-1] & ~valid[:, 1:]).any():
        raise NotImplementedError("attention_mask of a prefill must be left padding: zeros, then ones, in every row")
    if not valid[:, -1].all():
        row = int(valid[:, -1].int().argmin())
        raise NotImplementedError(
            f"left padding must end in the first pass over a bounded cache, got row {row}, of which all {t} tokens of "
            "the pass are padding: read larger chunks"
        )
    return valid


def position_after(position_ids: Tensor | None, inputs: Tensor) -> Tensor:
    """Position [b] of the token after a prefill whose positions are [b or 1, t], or [3, b, t] or [4, b, t] of models
    that count time, height and width apart, the latter with text positions before them."""
    b, t = inputs.shape[:2]
    if position_ids is None:
        last = torch.full((1,), t - 1, device=inputs.device)
    else:
        last = position_ids[..., -1]
        last = last[-3:].amax(0) if position_ids.ndim == 3 else last
    return last.to(inputs.device).expand(b) + 1


_NOT_TEXT = ("pixel", "image", "video", "audio", "input_features")


def text_ids(wrapper: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The tokens [b, t] that a model is called with; None where some of them stand for an image or a sound, and for
    embeddings."""
    given = inspect.signature(type(wrapper).forward).bind_partial(wrapper, *args, **kwargs).arguments
    given = {**given.pop("kwargs", {}), **given}
    if any(name.startswith(_NOT_TEXT) and value is not None for name, value in given.items()):
        return None
    ids = given.get("input_ids")
    return ids if isinstance(ids, Tensor) else None
