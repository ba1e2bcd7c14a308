"""What the layers of a cache need to know on the host, asked of the device once for all of them.

The layers of one cache are handed the same attention mask, or the same indices of batch rows, one after the other. The
first layer looks at it and the others take over what it saw.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

Found = TypeVar("Found")


class SharedReads:
    """Remembers what was last seen; shared by the layers of a cache.

    A layer that asks for the second time has come to the next forward pass and looks again, whatever the tensor's
    address; so nothing is held on to, and values that were changed in place are seen. Copies start empty.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[Any, set[int], Any]] = {}

    def once(self, what: str, layer: object, tensor: Tensor, key: tuple, read: Callable[[], Found]) -> Found:
        """``read()``, or what another layer got from it for the same tensor and ``key``."""
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, *key)
        known, seen_by, found = self._last.get(what, (None, set(), None))
        if known != key or id(layer) in seen_by:
            found, seen_by = read(), set()
            self._last[what] = (key, seen_by, found)
        seen_by.add(id(layer))
        return found

    def __reduce__(self) -> tuple:
        return SharedReads, ()
