"""Ragged stores with random entries and poisoned slack."""

import torch

from kvpress_prob.ragged import RaggedKV


def random_store(
    lengths: list[int],
    *,
    batch: int = 1,
    d: int = 16,
    dv: int | None = None,
    dtype: torch.dtype = torch.float32,
    room: int = 5,
    scale: float = 1.0,
    device: str = "cpu",
) -> RaggedKV:
    """Standard-normal keys, values and log-weights; NaN in every place behind a segment's end."""
    like_keys, like_values = (torch.empty(1, width, dtype=dtype, device=device) for width in (d, dv or d))
    store = RaggedKV.empty(like_keys, like_values, lengths, batch, room)
    for buffer in (store.keys, store.values, store.log_w):
        buffer.fill_(torch.nan)
    for row in range(batch):
        for head in range(store.kv_heads):
            for view in store.segment(row, head):
                view.normal_()
            store.segment(row, head)[0].mul_(scale)
    return store


def in_double(store: RaggedKV) -> RaggedKV:
    """The same entries in float64."""
    return RaggedKV(
        store.keys.double(), store.values.double(), store.log_w, store.start, store.length, store.batch, store.room
    )
