"""Public entry of ``append``: checks and dispatch."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from kvpress_prob.ops.append.reference import append_reference
from kvpress_prob.ops.availability import prefer_triton, require_triton
from kvpress_prob.ops.library import operator
from kvpress_prob.ragged import RaggedKV

Impl = Literal["auto", "reference", "triton"]
IMPLS: tuple[Impl, ...] = ("auto", "reference", "triton")


def append(
    store: RaggedKV,
    keys: Float[Tensor, "b hkv n d"],
    values: Float[Tensor, "b hkv n dv"],
    *,
    impl: Impl = "auto",
) -> None:
    """Write ``n`` new entries behind every segment of ``store``, with log-weight 0, and advance its lengths.

    In place: nothing of the store's size is allocated or copied. No gradient flows through a store.

    Parameters
    ----------
    store : RaggedKV
        Must have room for ``n`` entries (``RaggedKV.with_room``).
    keys, values : Float[Tensor, "b hkv n d"], Float[Tensor, "b hkv n dv"]
        Entries in the store's dtype and on its device. Need not be contiguous.
    impl : "auto", "reference" or "triton"
        "auto" takes "triton" on a GPU that can run it (``ops.availability``), else "reference". An explicit choice that
        cannot run raises.

    Raises
    ------
    ValueError
        If shapes, dtype, device or ``impl`` do not fit, the store lacks room or its buffers are not contiguous.

    Notes
    -----
    The device advances ``store.length``, the host ``store.room``: a CUDA graph replays the first alone, so whoever
    replays an append takes its entries off ``store.room``, and captures again after ``with_room`` made a new store.
    """
    for name, new, buffer in (("keys", keys, store.keys), ("values", values, store.values)):
        want = (store.batch, store.kv_heads, keys.shape[2], buffer.shape[-1])
        if tuple(new.shape) != want:
            raise ValueError(f"{name} must have shape {want}, got {tuple(new.shape)}")
        if new.dtype != buffer.dtype or new.device != buffer.device:
            raise ValueError(f"{name} must be {buffer.dtype} on {buffer.device}, got {new.dtype} on {new.device}")
    if keys.shape[2] > store.room:
        raise ValueError(f"store must have room for {keys.shape[2]} entries a segment, got room for {store.room}")
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")
    store.check_layout()
    keys, values = (it.detach() if it.requires_grad else it for it in (keys, values))
    _OPERATOR(store.keys, store.values, store.log_w, store.start, store.length, keys, values, impl)
    store.room -= keys.shape[2]


def _append(
    keys: Tensor,
    values: Tensor,
    log_w: Tensor,
    start: Tensor,
    length: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    impl: str,
) -> None:
    """The operator's body."""
    if impl == "triton":
        require_triton(new_keys, new_values)
    if impl == "triton" or (impl == "auto" and prefer_triton(new_keys, new_values)):
        from kvpress_prob.ops.append.triton_kernel import append_triton

        append_triton(keys, values, log_w, start, length, new_keys, new_values)
    else:
        append_reference(keys, values, log_w, start, length, new_keys, new_values)


def _fake(
    keys: Tensor,
    values: Tensor,
    log_w: Tensor,
    start: Tensor,
    length: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    impl: str,
) -> None:
    pass


_OPERATOR = operator("append", _append, _fake, mutates=("keys", "values", "log_w", "length"))
