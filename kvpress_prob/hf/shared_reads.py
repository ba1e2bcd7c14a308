"""What the layers of a cache need to know on the host, asked of the device once for all of them.

The layers of one cache are handed the same attention mask, or the same indices of batch rows, one after the other. The
first layer looks at it and the others take over what it saw.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Found = TypeVar("Found")


class SharedReads:
    """Remembers what was last seen; shared by the layers of a cache.

    A layer that asks for the second time has come to the next forward pass and looks again, so values that were changed
    in place are seen. Memory is not held on to, and what was seen is forgotten with it: another tensor may come to the
    same address, when layers were handed tensors of their own. Copies start empty.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[StorageWeakRef, Any, set[int], Any]] = {}

    def once(self, what: str, layer: object, tensor: Tensor, key: tuple, read: Callable[[], Found]) -> Found:
        """``read()``, or what another layer got from it for the same tensor and ``key``."""
        memory = StorageWeakRef(tensor.untyped_storage())
        key = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, *key)
        last = self._last.get(what)
        if last is None or last[0].expired() or last[:2] != (memory, key) or id(layer) in last[2]:
            last = self._last[what] = (memory, key, set(), read())
        last[2].add(id(layer))
        return last[3]

    def __reduce__(self) -> tuple:
        return SharedReads, ()
