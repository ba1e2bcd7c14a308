"""What an attention mask says about a compressed cache, and what it must not say."""

from typing import Any

import torch
from torch import Tensor

from kvpress_prob.ops.library import operator


def shown(mask: Tensor, n: int, padding: list[int], context_length: int, appended: int) -> Tensor | None:
    """Appended tokens that the newest one may see.

    Parameters
    ----------
    mask : Tensor
        [b or 1, heads or 1, n, context_length + appended] over the newest ``n`` tokens; bool, or additive with 0 and
        -inf.
    n : int
    padding : list of int
        Left padding of each batch row's context.
    context_length, appended : int

    Returns
    -------
    Bool[Tensor, "b appended"] or None
        None when all of them are shown.

    Raises
    ------
    ValueError
        If the mask has another shape.
    NotImplementedError
        If it differs between heads, holds a bias, hides more or less of the context than its own left padding, or is
        not causal.

    Notes
    -----
    Everything is asked of the device at once. A single new token needs no causal check.
    """
    t, length, batch = context_length, context_length + appended, len(padding)
    if mask.shape[-1] != length or mask.shape[-2] != n:
        raise ValueError(f"attention_mask must cover {n} new tokens and {length} entries, got {tuple(mask.shape[-2:])}")
    allowed = mask if mask.dtype == torch.bool else mask == 0
    first = allowed[:, 0].expand(batch, n, length)
    visible = first[:, -1]  # [b length]
    context = visible[:, :t]
    if any(padding):
        place = torch.arange(t, device=mask.device)
        context = context == (place >= torch.tensor(padding, device=mask.device).unsqueeze(-1))
    answers = [visible[:, t:].all(), context.all()]
    if allowed.shape[1] > 1:
        answers.append((allowed == allowed[:, :1]).all())
    if mask.dtype != torch.bool:
        answers.append((allowed | (mask <= torch.finfo(mask.dtype).min / 2)).all())
    if n > 1:
        causal = torch.ones(n, length, dtype=torch.bool, device=mask.device).tril(length - n)
        answers.append((first == (causal & visible.unsqueeze(1))).all())
    all_shown, own_padding, *rest = torch.stack(answers).tolist()
    if allowed.shape[1] > 1 and not rest.pop(0):
        raise NotImplementedError("over a compressed KV cache, attention_mask must be the same for all heads")
    if mask.dtype != torch.bool and not rest.pop(0):
        raise NotImplementedError("over a compressed KV cache, attention_mask must hold 0 and -inf only, not a bias")
    if not own_padding or not all(rest):
        raise NotImplementedError(
            "over a compressed KV cache, attention_mask may hide left padding only (causal attention)"
        )
    return None if all_shown else visible[:, t:]


def check_padding(mask: Any, padding: list[int], length: int) -> None:
    """Refuse a mask [b, length] over a bounded cache that is not its own left padding. Those of four dimensions, and
    dicts of such, are looked at by the layers, if they cover the whole length."""
    if mask is None and any(padding):
        raise NotImplementedError("attention_mask must be given over a compressed KV cache with left padding, got None")
    if isinstance(mask, dict):
        mask = mask.get("full_attention")
    if not isinstance(mask, Tensor):
        return
    if mask.ndim != 2:
        if mask.shape[-1] != length:
            raise ValueError(f"attention_mask must cover {length} entries, got {tuple(mask.shape)}")
        return
    pads = torch.tensor(padding, device=mask.device)
    if mask.shape != (len(padding), length) or not torch.equal(
        mask.bool(), torch.arange(length, device=mask.device) >= pads.unsqueeze(-1)
    ):
        raise NotImplementedError(
            f"over a bounded KV cache, attention_mask must have shape {(len(padding), length)} and hide left padding "
            f"alone, got {tuple(mask.shape)}"
        )


def show(log_w: Tensor, start: Tensor, length: Tensor, appended: int, visible: Tensor | None) -> None:
    """Set the log-weights of the newest ``appended`` entries: 0, or -inf where ``visible`` [b appended] says so."""
    place = (start + length).unsqueeze(-1) - torch.arange(appended, 0, -1, device=start.device)  # [s appended]
    if visible is None:
        log_w[place] = 0.0
    else:
        weight = torch.where(visible.to(log_w.device), log_w.new_zeros(()), -torch.inf)
        weight = weight.unsqueeze(1).expand(-1, len(start) // len(visible), -1)
        log_w[place] = weight.reshape(place.shape).to(log_w.dtype)


def _apply_mask(
    log_w: Tensor,
    start: Tensor,
    stored: Tensor,
    mask: Tensor,
    n: int,
    padding: list[int],
    context_length: int,
    appended: int,
) -> None:
    show(log_w, start, stored, appended, shown(mask, n, padding, context_length, appended))


def _fake_apply_mask(
    log_w: Tensor,
    start: Tensor,
    stored: Tensor,
    mask: Tensor,
    n: int,
    padding: list[int],
    context_length: int,
    appended: int,
) -> None:
    pass


apply_mask = operator("apply_mask", _apply_mask, _fake_apply_mask, mutates=("log_w",))
"""``shown`` and ``show`` as one operator, for compiled models: the host decides by what the mask holds."""
