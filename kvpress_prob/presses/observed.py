"""What the scorers over the prefill's own query rows share."""

import torch
from torch import Tensor, nn

from kvpress_prob.hf import attention_inputs
from kvpress_prob.maths.proposals import PRIORS, Prior, row_prior
from kvpress_prob.maths.rows import sample_rows
from kvpress_prob.ops import attention_mass


def observed_mass(
    module: nn.Module, hidden_states: Tensor, keys: Tensor, kwargs: dict, prior: Prior, max_rows: int | None
) -> Tensor:
    """``sum_j h_j p_j(i)`` [b, hq, t] over the query rows, or over ``max_rows`` of them with matching weights.

    The rows are the newest of the ``t`` entries: all of a prefill's, fewer when a kvpress press scores while decoding.
    """
    inputs = attention_inputs(module, hidden_states, kwargs)
    b, t, n = keys.shape[0], keys.shape[2], inputs.query.shape[2]
    valid = kwargs.get("valid")
    seen = torch.ones(b, t, dtype=torch.bool, device=keys.device) if valid is None else valid
    weights = row_prior(prior, seen[:, t - n :])
    if max_rows is not None and max_rows < n:
        rows, weights = sample_rows(weights, max_rows)
    else:
        rows = weights.any(0).nonzero().squeeze(-1)
        weights = weights[:, rows]
    query = inputs.query if len(rows) == n else inputs.query[:, :, rows]
    mass, _ = attention_mass(
        query, keys, weights, scaling=inputs.scaling, softcap=inputs.softcap, positions=rows + t - n, valid=valid
    )
    return mass


def check_observation(compression_ratio: float, prior: str, max_rows: int | None) -> None:
    """Raise ``ValueError`` for parameters that no scorer over query rows accepts."""
    check_ratio(compression_ratio)
    if prior not in PRIORS:
        raise ValueError(f"prior must be one of {PRIORS}, got {prior!r}")
    if max_rows is not None and (not isinstance(max_rows, int) or max_rows < 1):
        raise ValueError(f"max_rows must be None or an integer >= 1, got {max_rows!r}")


def check_ratio(compression_ratio: float) -> None:
    """Raise ``ValueError`` unless the ratio is a number in [0, 1)."""
    if not isinstance(compression_ratio, (int, float)) or not 0 <= compression_ratio < 1:
        raise ValueError(f"compression_ratio must be a number in [0, 1), got {compression_ratio!r}")
