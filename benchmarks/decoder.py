"""One decode step of a Llama-shaped model with random weights, in plain torch; attention is the caller's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, query [b hq 1 d], key [b hkv 1 d], value [b hkv 1 d]) -> [b hq 1 d]``: appends, then attends."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the default is Llama-3.2-3B's."""

    layers: int = 28
    hidden: int = 3072
    heads: int = 24
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 8192
    vocabulary: int = 128_256


class Decoder:
    """Weights of the model; input and output embeddings are tied."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device):
        self.shape = shape

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, dtype=dtype, device=device).mul_(columns**-0.5)

        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.embedding = weight(shape.vocabulary, shape.hidden)
        self.layers = [
            {
                "qkv": weight(width + 2 * kv_width, shape.hidden),
                "o": weight(shape.hidden, width),
                "gate_up": weight(2 * shape.intermediate, shape.hidden),
                "down": weight(shape.hidden, shape.intermediate),
            }
            for _ in range(shape.layers)
        ]
        exponent = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
        self.frequency = 500_000.0**-exponent

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, all of which a step reads."""
        matrices = [self.embedding, *(matrix for layer in self.layers for matrix in layer.values())]
        return sum(matrix.numel() * matrix.element_size() for matrix in matrices)

    def step(self, ids: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Logits [b, vocabulary] after one token [b] at a position [1]."""
        shape = self.shape
        angle = position.float() * self.frequency
        cos, sin = (torch.cat((part, part)).to(self.embedding.dtype) for part in (angle.cos(), angle.sin()))
        hidden = self.embedding[ids]  # [b hidden]
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        for index, layer in enumerate(self.layers):
            heads = F.linear(_normalised(hidden), layer["qkv"]).unflatten(-1, (-1, 1, shape.head_dim))  # [b h 1 d]
            query, key, value = heads.split(sizes, 1)
            query, key = (states * cos + _rotated(states) * sin for states in (query, key))
            hidden = hidden + F.linear(attend(index, query, key, value).flatten(1), layer["o"])
            gate, up = F.linear(_normalised(hidden), layer["gate_up"]).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer["down"])
        return F.linear(_normalised(hidden), self.embedding)


def _normalised(hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:])


def _rotated(states: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return torch.cat((-second, first), -1)
