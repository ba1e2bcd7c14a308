"""Which query rows a prefill statistic reads when reading all of them costs too much.

``sum_j h_j p_j(i)`` over all ``n`` rows is replaced by ``sum_{j in S} (h_j / q_j) p_j(i)`` over ``R`` of them: the
newest half of ``R`` for certain (``q_j = 1``), the rest a systematic sample of the older rows with ``q_j`` proportional
to ``h_j`` (capped at 1). Both the estimate and its cost, ``R n`` instead of ``n^2 / 2`` products, follow from ``S``
alone.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpress_prob.maths.budget import solve_inclusion
from kvpress_prob.maths.sampling import systematic_sample


def sample_rows(
    prior: Float[Tensor, "b n"], max_rows: int, offset: float = 0.5
) -> tuple[Int[Tensor, " r"], Float[Tensor, "b r"]]:
    """Choose at most ``max_rows`` rows and their weights.

    Parameters
    ----------
    prior : Float[Tensor, "b n"]
        Row prior ``h_j`` of every batch row, float64. Rows without weight in any batch row are never chosen.
    max_rows : int
        R, at least 1.
    offset : float
        Explicit uniform in [0, 1) of the systematic sample. The fixed default makes a statistic deterministic; with a
        random offset the weighted sum is unbiased.

    Returns
    -------
    rows : Int[Tensor, "r"]
        Chosen rows in increasing order, the same for all batch rows.
    weights : Float[Tensor, "b r"]
        ``h_j / q_j``, float64.
    """
    n = prior.shape[1]
    mean = prior.mean(0)
    newest = torch.zeros(n, dtype=torch.bool, device=prior.device)
    newest[n - max((max_rows + 1) // 2, 1) :] = True
    older = torch.where(newest, 0, mean)
    budget = torch.tensor([max_rows // 2], dtype=torch.float64, device=prior.device)
    group = torch.zeros(1, dtype=torch.int64, device=prior.device)
    q = solve_inclusion(older.unsqueeze(0), group, budget, at_least=torch.zeros_like(budget)).squeeze(0)
    q = torch.where(newest & (mean > 0), 1, q)
    chosen = systematic_sample(q.unsqueeze(0), torch.tensor([offset], dtype=torch.float64, device=q.device)).squeeze(0)
    rows = chosen.nonzero().squeeze(-1)
    return rows, prior[:, rows] / q[rows]
