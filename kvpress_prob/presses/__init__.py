"""Floor 4: presses. One thin dataclass a file, in kvpress' manner."""

from kvpress_prob.presses.attention_press import AttentionPress
from kvpress_prob.presses.component import Component
from kvpress_prob.presses.h2o_press import H2OPress
from kvpress_prob.presses.min_variance_press import MinVariancePress
from kvpress_prob.presses.physical_press import PhysicalPress
from kvpress_prob.presses.probabilistic_press import ProbabilisticPress
from kvpress_prob.presses.registry import PHYSICAL_PRESSES, PRESSES, make_press
from kvpress_prob.presses.report import CompressionReport
from kvpress_prob.presses.surrogate_press import SurrogatePress

__all__ = [
    "PHYSICAL_PRESSES",
    "PRESSES",
    "AttentionPress",
    "Component",
    "CompressionReport",
    "H2OPress",
    "MinVariancePress",
    "PhysicalPress",
    "ProbabilisticPress",
    "SurrogatePress",
    "make_press",
]
