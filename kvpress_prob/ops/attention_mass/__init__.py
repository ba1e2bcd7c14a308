"""Attention that each entry receives from the prefill's query rows, without a rows-by-entries tensor."""

from kvpress_prob.ops.attention_mass.api import STATISTICS, Statistic, attention_mass

__all__ = ["STATISTICS", "Statistic", "attention_mass"]
