"""Probabilistic KV-cache eviction for kvpress: draw what each head keeps, evict the rest, correct attention while
decoding."""

from kvpress_prob.hf import CacheBudget, load_compressed, save_compressed
from kvpress_prob.presses import (
    PHYSICAL_PRESSES,
    PRESSES,
    AttentionPress,
    Component,
    CompressionReport,
    H2OPress,
    MinVariancePress,
    PhysicalPress,
    ProbabilisticPress,
    SurrogatePress,
    make_press,
)
from kvpress_prob.sources import ExpectedQueries, Lookahead, PrefillRows, Reconstruction

__version__ = "0.1.0"

__all__ = [
    "PHYSICAL_PRESSES",
    "PRESSES",
    "AttentionPress",
    "CacheBudget",
    "Component",
    "CompressionReport",
    "ExpectedQueries",
    "H2OPress",
    "Lookahead",
    "MinVariancePress",
    "PhysicalPress",
    "PrefillRows",
    "ProbabilisticPress",
    "Reconstruction",
    "SurrogatePress",
    "__version__",
    "load_compressed",
    "make_press",
    "save_compressed",
]
