"""Public entry of ``weighted_decode``: checks and dispatch."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from kvpress_prob.ops.weighted_decode import cpu
from kvpress_prob.ops.weighted_decode.reference import weighted_decode_reference
from kvpress_prob.ragged import RaggedKV

Impl = Literal["auto", "reference", "cpu"]
IMPLS: tuple[Impl, ...] = ("auto", "reference", "cpu")


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
    impl : "auto", "reference" or "cpu"
        "auto" takes "cpu" for float32, bfloat16 and float16 CPU tensors with keys and values of one width and no
        softcap, else "reference". An explicit choice that cannot run raises.

    Returns
    -------
    output : Float[Tensor, "b hq n dv"]
        In the query's dtype; 0 where nothing is seen.
    lse : Float[Tensor, "b hq n"] or None
        Natural log-sum-exp of the weighted logits, float32 (float64 for float64 queries); -inf where nothing is seen.

    Raises
    ------
    ValueError
        If shapes, dtype, device or ``impl`` do not fit.
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
    obstacle = _cpu_obstacle(query, store, softcap)
    if impl == "auto":
        impl = "reference" if obstacle else "cpu"
    tensors = (query, store.keys, store.values, store.log_w, store.start, store.length)
    if impl == "reference":
        output, lse = weighted_decode_reference(*tensors, scaling, softcap)
        return output, lse if return_lse else None
    if impl == "cpu":
        if obstacle:
            raise ValueError(f"impl='cpu' needs {obstacle}")
        return cpu.weighted_decode_cpu(*tensors, scaling, return_lse)
    raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")


def _cpu_obstacle(query: Tensor, store: RaggedKV, softcap: float | None) -> str | None:
    """What keeps ``impl="cpu"`` from running, or None."""
    if query.device.type != "cpu":
        return f"CPU tensors, got {query.device}"
    if query.dtype not in cpu.DTYPES:
        return f"a dtype of {cpu.DTYPES}, got {query.dtype}"
    if store.keys.shape[-1] != store.values.shape[-1]:
        return f"keys and values of one width, got {store.keys.shape[-1]} and {store.values.shape[-1]}"
    if softcap is not None:
        return f"softcap=None, got {softcap}"
    return None
