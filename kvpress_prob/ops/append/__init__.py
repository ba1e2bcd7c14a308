"""Append a step's keys and values to every segment of a ragged store, in place."""

from kvpress_prob.ops.append.api import append

__all__ = ["append"]
