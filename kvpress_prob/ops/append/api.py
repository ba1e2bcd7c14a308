"""Public entry of ``append``: checks and dispatch."""

from jaxtyping import Float
from torch import Tensor

from kvpress_prob.ops.append.reference import append_reference
from kvpress_prob.ragged import RaggedKV


def append(store: RaggedKV, keys: Float[Tensor, "b hkv n d"], values: Float[Tensor, "b hkv n dv"]) -> None:
    """Write ``n`` new entries behind every segment of ``store``, with log-weight 0, and advance its lengths.

    In place: nothing of the store's size is allocated or copied. No gradient flows through a store.

    Parameters
    ----------
    store : RaggedKV
        Must have room for ``n`` entries (``RaggedKV.with_room``).
    keys, values : Float[Tensor, "b hkv n d"], Float[Tensor, "b hkv n dv"]
        Entries in the store's dtype and on its device.

    Raises
    ------
    ValueError
        If shapes, dtype or device do not fit the store, or it lacks room.
    """
    for name, new, buffer in (("keys", keys, store.keys), ("values", values, store.values)):
        want = (store.batch, store.kv_heads, keys.shape[2], buffer.shape[-1])
        if tuple(new.shape) != want:
            raise ValueError(f"{name} must have shape {want}, got {tuple(new.shape)}")
        if new.dtype != buffer.dtype or new.device != buffer.device:
            raise ValueError(f"{name} must be {buffer.dtype} on {buffer.device}, got {new.dtype} on {new.device}")
    if keys.shape[2] > store.room:
        raise ValueError(f"store must have room for {keys.shape[2]} entries a segment, got room for {store.room}")
    append_reference(store, keys.detach(), values.detach())
