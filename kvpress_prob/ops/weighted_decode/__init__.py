"""Attention of a few new queries over a ragged store of weighted entries."""

from kvpress_prob.ops.weighted_decode.api import weighted_decode

__all__ = ["weighted_decode"]
