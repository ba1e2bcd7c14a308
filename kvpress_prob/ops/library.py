"""Registration of the operations as torch custom operators, ``torch.ops.kvpress_prob.*``.

A compiler sees an operator as one opaque call: what happens inside, the choice of an implementation and reads of
lengths on the CPU included, is never traced, so ``torch.compile`` neither breaks its graph there nor specialises on it.
The plain ``Library`` calls cost 5 us a call where ``torch.library.custom_op`` costs 20, and decoding makes two a layer.
"""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("kvpress_prob", "FRAGMENT")


def operator(
    name: str, body: Callable[..., Any], fake: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Register ``body`` as ``torch.ops.kvpress_prob.<name>`` and return the operator.

    Parameters
    ----------
    name : str
    body : callable
        Takes and returns tensors and plain numbers, all annotated (``torch.library.infer_schema``). No gradient flows
        through it.
    fake : callable
        Same signature: empty outputs of the right shape, dtype and device.
    mutates : tuple of str
        Arguments that ``body`` writes to.
    """
    _LIBRARY.define(name + torch.library.infer_schema(body, mutates_args=mutates))
    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvpress_prob::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.kvpress_prob, name).default
