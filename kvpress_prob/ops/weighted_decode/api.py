"""Public entry of ``weighted_decode``: checks and dispatch."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvpress_prob.ops.availability import prefer_triton, require_triton
from kvpress_prob.ops.library import operator
from kvpress_prob.ops.weighted_decode import cpu
from kvpress_prob.ops.weighted_decode.reference import weighted_decode_reference
from kvpress_prob.ragged import RaggedKV

Impl = Literal["auto", "reference", "cpu", "triton"]
IMPLS: tuple[Impl, ...] = ("auto", "reference", "cpu", "triton")


def weighted_decode(
    query: Float[Tensor, "b hq n d"],
    store: RaggedKV,
    *,
    scaling: float,
    softcap: float | None = None,
    return_lse: bool = False,
    impl: Impl = "auto",
) -> tuple[Float[Tensor, "b hq n dv"], Float[Tensor, "b hq n"] | None]:
    """Attention of ``n`` query rows whose own entries are the newest ``n`` of every segment.

    Row ``i`` (of ``n``) sees all but the newest ``n - 1 - i`` entries. ``log w`` is added to the scaled (and capped)
    logits: with log importance weights this is the self-normalised estimator of attention over the evicted prefix,
    exact over later entries (arXiv 2608.28293, Algorithm 1).

    Parameters
    ----------
    query : Float[Tensor, "b hq n d"]
        Same dtype and device as the store. Need not be contiguous.
    store : RaggedKV
        Keys, values and log-weights; ``hq`` is a multiple of its KV heads.
    scaling : float
        Factor of the logits.
    softcap : float, optional
        Logits become ``softcap * tanh(logits / softcap)`` before ``log w`` is added.
    return_lse : bool
        Return the log-sum-exp too.
    impl : "auto", "reference", "cpu" or "triton"
        "auto" takes "triton" on a GPU that can run it (``ops.availability``), "cpu" for float32, bfloat16 and float16
        CPU tensors with keys and values of one width and no softcap, else "reference". An explicit choice that cannot
        run raises.

    Returns
    -------
    output : Float[Tensor, "b hq n dv"]
        In the query's dtype; 0 where nothing is seen.
    lse : Float[Tensor, "b hq n"] or None
        Natural log-sum-exp of the weighted logits, float32 (float64 for float64 queries); -inf where nothing is seen.

    Raises
    ------
    ValueError
        If shapes, dtype, device or ``impl`` do not fit, or the store's buffers are not contiguous.
    """
    b, hq, _, d = query.shape
    if b != store.batch or d != store.keys.shape[-1] or hq % store.kv_heads:
        raise ValueError(
            f"query must have shape ({store.batch}, a multiple of {store.kv_heads}, n, {store.keys.shape[-1]}), "
            f"got {tuple(query.shape)}"
        )
    if query.dtype != store.keys.dtype or query.device != store.keys.device:
        raise ValueError(
            f"query must be {store.keys.dtype} on {store.keys.device}, got {query.dtype} on {query.device}"
        )
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")
    store.check_layout()
    output, lse = _OPERATOR(
        query, store.keys, store.values, store.log_w, store.start, store.length, scaling, softcap, return_lse, impl
    )
    return output, lse if return_lse else None


def _weighted_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    log_w: Tensor,
    start: Tensor,
    length: Tensor,
    scaling: float,
    softcap: float | None,
    return_lse: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """The operator's body. An operator returns tensors only: without ``return_lse`` the second one is empty."""
    tensors = (query, keys, values, log_w, start, length)
    cpu_obstacle = _cpu_obstacle(query, keys, values, softcap)
    if impl == "auto":
        impl = "triton" if prefer_triton(keys, values) else "reference" if cpu_obstacle else "cpu"
    if impl == "triton":
        require_triton(keys, values)
        from kvpress_prob.ops.weighted_decode.triton_kernel import weighted_decode_triton

        output, lse = weighted_decode_triton(*tensors, scaling, softcap)
    elif impl == "cpu":
        if cpu_obstacle:
            raise ValueError(f"impl='cpu' needs {cpu_obstacle}")
        output, lse = cpu.weighted_decode_cpu(*tensors, scaling, return_lse)
    else:
        output, lse = weighted_decode_reference(*tensors, scaling, softcap)
    return output, lse if return_lse and lse is not None else log_w.new_empty(0)


def _fake(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    log_w: Tensor,
    start: Tensor,
    length: Tensor,
    scaling: float,
    softcap: float | None,
    return_lse: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    b, hq, n, _ = query.shape
    output = query.new_empty(b, hq, n, values.shape[-1])
    if not return_lse:
        return output, log_w.new_empty(0)
    return output, query.new_empty(b, hq, n, dtype=torch.promote_types(query.dtype, torch.float32))


_OPERATOR = operator("weighted_decode", _weighted_decode, _fake)


def _cpu_obstacle(query: Tensor, keys: Tensor, values: Tensor, softcap: float | None) -> str | None:
    """What keeps ``impl="cpu"`` from running, or None."""
    if query.device.type != "cpu":
        return f"CPU tensors, got {query.device}"
    if query.dtype not in cpu.DTYPES:
        return f"a dtype of {cpu.DTYPES}, got {query.dtype}"
    if keys.shape[-1] != values.shape[-1]:
        return f"keys and values of one width, got {keys.shape[-1]} and {values.shape[-1]}"
    if softcap is not None:
        return f"softcap=None, got {softcap}"
    return None
