"""One long call of a decoder as several short ones."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Cache

_WHOLE = ("past_key_values", "use_cache", "output_attentions", "output_hidden_states", "return_dict")


def pieces(given: dict[str, Any], size: int, new_cache: Callable[[], Cache]) -> list[dict[str, Any]]:
    """Arguments of the calls that read the tokens of a call in chunks, over one cache.

    Parameters
    ----------
    given : dict
        Arguments of the call, by name.
    size : int
        Tokens of a chunk.
    new_cache : callable
        Makes the cache that the model would have made, if none is given.

    Raises
    ------
    TypeError
        For an argument that may belong to the tokens and is not known to.
    """
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    inputs = embeds if ids is None else ids
    if inputs is None or inputs.shape[1] <= size:
        return [given]
    n = inputs.shape[1]
    given = dict(given)
    cache = given["past_key_values"] = new_cache() if given.get("past_key_values") is None else given["past_key_values"]
    past = cache.get_seq_length()
    for name, value in given.items():
        if name not in _SLICED and name not in _WHOLE and isinstance(value, Tensor | list | tuple | dict):
            raise TypeError(f"{name} cannot be split into chunks of {size} tokens: call the model chunk by chunk")
    calls = []
    for begin in range(0, n, size):
        end = min(begin + size, n)
        sliced = {
            name: _SLICED[name](value, begin, end, past) if name in _SLICED and value is not None else value
            for name, value in given.items()
        }
        calls.append(sliced)
    return calls


def _tokens(value: Tensor, begin: int, end: int, past: int) -> Tensor:
    return value[:, begin:end]


def _last(value: Tensor, begin: int, end: int, past: int) -> Tensor:
    return value[..., begin:end]


def _mask(value: Any, begin: int, end: int, past: int) -> Any:
    """A mask [b, past + n] or [b, heads, n, past + n], or one for each kind of layer."""
    if isinstance(value, dict):
        return {kind: _mask(mask, begin, end, past) if mask is not None else None for kind, mask in value.items()}
    return value[:, : past + end] if value.ndim == 2 else value[:, :, begin:end, : past + end]


_SLICED: dict[str, Callable[[Any, int, int, int], Any]] = {
    "input_ids": _tokens,
    "inputs_embeds": _tokens,
    "position_ids": _last,
    "cache_position": _last,
    "attention_mask": _mask,
}
"""How the arguments that belong to the tokens are cut."""
