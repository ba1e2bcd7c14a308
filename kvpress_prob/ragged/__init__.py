"""Floor 1: the ragged key/value store, pure tensors."""

from kvpress_prob.ragged.store import RaggedKV

__all__ = ["RaggedKV"]
