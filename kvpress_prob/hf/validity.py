"""Which tokens of a prefill are there, and which are padding."""

from typing import Any

import torch
from torch import Tensor


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
