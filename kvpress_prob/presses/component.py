"""One of several proposals that share a budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpress import ScorerPress

from kvpress_prob.maths.arguments import check_choice, check_fraction, check_positive, is_number
from kvpress_prob.maths.draw import BUDGET_WEIGHTINGS, BudgetWeighting
from kvpress_prob.maths.proposals import SCORES_ARE, ScoresAre
from kvpress_prob.presses.kvpress_scorers import ScoreRule, score_rule

Share = float | Callable[[float], float]


@dataclass
class Component:
    """
    A scorer and its part in the draw of a ``ProbabilisticPress``.

    Parameters
    ----------
    press : ScorerPress
    share : float or callable, optional, default=None
        Share of the budget, in [0, 1], or the share as a function of the compression ratio. None, for one component of
        a press, is what the others leave.
    budget_weighting : {"uniform", "score"}, default="uniform"
        Draw from normalised proposals, every head alike, or from each head in proportion to its scores' total.
    proposal_temperature : float, default=1.0
        Weights s become s^(1/T), logits softmax(s/T); towards 0 the draw approaches top-k.
    scores_are : {"weights", "log_weights", "logits"}, optional, default=None
        What the scores are: amounts >= 0, their logarithms, or any numbers that compare the entries of one head. None
        asks the scorer: kvpress' scorers are known (docs/proposals.md), others may declare ``scores_are`` as an
        attribute of their class. Of a scorer that does not, a head whose scores go below 0 has logits, any other head
        weights.
    """

    press: ScorerPress
    share: Share | None = None
    budget_weighting: BudgetWeighting = "uniform"
    proposal_temperature: float = 1.0
    scores_are: ScoresAre | None = None

    @property
    def rule(self) -> ScoreRule:
        """How the scores are read."""
        return score_rule(self.press, self.scores_are)

    def check(self) -> None:
        """Raise ``TypeError`` or ``ValueError`` for a parameter out of range."""
        if not isinstance(self.press, ScorerPress):
            raise TypeError(f"press must be a kvpress ScorerPress, got {type(self.press).__name__}")
        if self.share is not None and not callable(self.share):
            check_fraction("share", self.share)
        check_positive("proposal_temperature", self.proposal_temperature)
        check_choice("budget_weighting", self.budget_weighting, BUDGET_WEIGHTINGS)
        rule = self.rule
        if rule.scores_are is not None:
            check_choice("scores_are", rule.scores_are, SCORES_ARE)
        if self.budget_weighting == "score" and not rule.common_scale:
            raise ValueError(
                "budget_weighting='score' needs scores with one scale for all heads and layers, "
                f"got {type(self.press).__name__}: {rule.note or 'logits'}"
            )


def shares_of(components: Sequence[Component], compression_ratio: float) -> list[float]:
    """Shares of the budget at a ratio.

    Raises
    ------
    ValueError
        If a share is outside [0, 1], or they do not sum to 1.
    """
    given = [it.share(compression_ratio) if callable(it.share) else it.share for it in components]
    known = [share for share in given if share is not None]
    if not all(is_number(share) for share in known):
        raise ValueError(f"share of the components must be numbers or None, got {given}")
    rest = 1 - sum(known)
    shares = [rest if share is None else share for share in given]
    if len(components) - len(known) > 1 or not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-9:
        raise ValueError(
            f"share of the components must be in [0, 1] and sum to 1, with None for at most one of them, got {given}"
        )
    return shares
