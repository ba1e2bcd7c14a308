"""``append`` in plain torch: one scatter per buffer."""

import torch
from jaxtyping import Float
from torch import Tensor

from kvpress_prob.ragged import RaggedKV


def append_reference(store: RaggedKV, keys: Float[Tensor, "b hkv n d"], values: Float[Tensor, "b hkv n dv"]) -> None:
    """See ``append``; arguments are already checked."""
    n = keys.shape[2]
    places = (
        (store.start + store.length).unsqueeze(-1) + torch.arange(n, device=store.start.device)
    ).flatten()  # [s n]
    store.keys.index_copy_(0, places, keys.reshape(-1, keys.shape[-1]))
    store.values.index_copy_(0, places, values.reshape(-1, values.shape[-1]))
    store.log_w.index_fill_(0, places, 0.0)
    store.length.add_(n)
    store.room -= n
