"""``append`` in plain torch: one scatter per buffer."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def append_reference(
    keys: Float[Tensor, "c d"],
    values: Float[Tensor, "c dv"],
    log_w: Float[Tensor, " c"],
    start: Int64[Tensor, " s"],
    length: Int64[Tensor, " s"],
    new_keys: Float[Tensor, "b hkv n d"],
    new_values: Float[Tensor, "b hkv n dv"],
) -> None:
    """See ``append``; arguments are already checked."""
    n = new_keys.shape[2]
    places = ((start + length).unsqueeze(-1) + torch.arange(n, device=start.device)).flatten()  # [s n]
    keys.index_copy_(0, places, new_keys.reshape(-1, new_keys.shape[-1]))
    values.index_copy_(0, places, new_values.reshape(-1, new_values.shape[-1]))
    log_w.index_fill_(0, places, 0.0)
    length.add_(n)
