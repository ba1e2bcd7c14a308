"""Dtypes where autocast is on: a model's queries, keys and values may then differ, and operations compute as they are
specified whatever it says."""

from collections.abc import Callable
from functools import reduce, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the smallest dtype that holds all of theirs."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return tuple(tensor.to(dtype) for tensor in tensors)


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """A function that computes in the dtypes of its arguments whatever autocast says."""

    @wraps(function)
    def precise(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return precise
