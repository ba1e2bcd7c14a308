"""Rotary embeddings: where scorers look for them, how queries are turned, and the state that some of them have.

Dynamic NTK scaling and LongRoPE exchange their frequencies when a forward pass reaches another length, and keep them
for later passes. A pass of our own over positions that are still to come must neither see other frequencies than the
keys that it asks, nor leave any behind.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from kvpress_prob.hf.borrowed import borrow


@dataclass(frozen=True)
class RotaryState:
    """Frequencies of a model's rotary embeddings at one moment.

    Attributes
    ----------
    modules : list of (module, dict of str to tensor or number)
        Empty for a model whose frequencies never change.
    """

    modules: list[tuple[nn.Module, dict[str, Any]]]

    @classmethod
    def of(cls, root: nn.Module) -> "RotaryState":
        """State of every rotary embedding in a module."""
        return cls([(module, _state(module)) for module in root.modules() if _changes(module)])

    def now(self) -> "RotaryState":
        """State of the same modules at this moment."""
        return RotaryState([(module, _state(module)) for module, _ in self.modules])

    def restore(self) -> None:
        """Put the frequencies back; on the device and in the dtype that the module has by now."""
        for module, before in self.modules:
            after = _state(module)
            for name in after.keys() - before.keys():
                delattr(module, name)
            for name, value in before.items():
                moved = isinstance(value, Tensor) and isinstance(after.get(name), Tensor)
                setattr(module, name, value.to(after[name]) if moved else value)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever happens to the frequencies inside the block, they are these after it."""
        try:
            yield
        finally:
            self.restore()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block the frequencies are these, however far a pass reaches; after it, those before."""
        before = self.now()
        with ExitStack() as stack:
            stack.enter_context(before.kept())
            self.restore()
            for module, _ in self.modules:
                kind = cast(Any, module).rope_type
                held = dict.fromkeys(kind, "held") if isinstance(kind, dict) else "held"
                stack.callback(borrow(module, "rope_type", held))
            yield


def _changes(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", ())
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)


def _state(module: nn.Module) -> dict[str, Any]:
    """Tensors and numbers of a module: frequencies, their scaling, the longest length so far."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor | float | int)}
    return {**{name: value for name, value in plain.items() if name != "training"}, **module._buffers}


@contextmanager
def reachable_rotary(decoder: Any) -> Iterator[None]:
    """Put a decoder's rotary embedding where kvpress' scorers look for it, on its attention modules."""
    with ExitStack() as stack:
        for module in [layer.self_attn for layer in decoder.layers] if hasattr(decoder, "rotary_emb") else []:
            own = getattr(module, "rotary_emb", decoder.rotary_emb)
            stack.callback(borrow(module, "rotary_emb", own))
        yield


def rotate(module: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [b h n d] by angles [b n d], the way the model of an attention module does."""
    return function_beside(module, "apply_rotary_pos_emb")(x, x, cos, sin)[0]


def function_beside(module: nn.Module, name: str) -> Any:
    """A function of the file of a module's class, or of the class' bases: a subclass may live in another file.

    Raises
    ------
    TypeError
        If there is none.
    """
    for cls in type(module).__mro__:
        function = getattr(sys.modules[cls.__module__], name, None)
        if function is not None:
            return function
    raise TypeError(f"no {name} beside {type(module).__name__}")
