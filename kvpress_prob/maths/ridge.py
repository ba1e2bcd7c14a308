r"""Ridge regression in closed form, from moments that are accumulated block by block.

Rows ``(x, y)``, inputs ``x`` of width ``p`` and targets ``y`` of width ``k``. With ``n`` rows, means ``mx``, ``my`` and
the centred sums ``Sxx = sum (x - mx)(x - mx)^T``, ``Sxy``, ``Syy`` (the diagonal only)::

    merging     n = na + nb,  d = mb - ma,  S = Sa + Sb + d d^T na nb / n        Chan, Golub and LeVeque, 1983
    standard    z = (x - mx) / s,  s = sqrt(diag Sxx / n), 1 where an input never changes
    ridge       W = (Z^T Z / n + lambda I)^{-1} Z^T (y - my) / n,  prediction  my + z W
    R^2         1 - sum (y - prediction)^2 / sum (y - my)^2, of any rows whose moments are known

Nothing but moments is kept, so memory does not grow with the rows, and what was learned from some rows can be tested on
others, or left out again (``without``), without reading any row twice. Everything is float64; centring on the way keeps
it accurate for inputs that are far from zero. Leading axes (layers) are independent problems.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """What ridge regression needs to know of a set of rows.

    Attributes
    ----------
    count : Float[Tensor, ""]
        Number of rows, the same for all layers.
    mean_x, mean_y : Float[Tensor, "*layer p"], Float[Tensor, "*layer k"]
    xx : Float[Tensor, "*layer p p"]
    xy : Float[Tensor, "*layer p k"]
    yy : Float[Tensor, "*layer k"]
    """

    count: Float[Tensor, ""]
    mean_x: Float[Tensor, "*layer p"]
    mean_y: Float[Tensor, "*layer k"]
    xx: Float[Tensor, "*layer p p"]
    xy: Float[Tensor, "*layer p k"]
    yy: Float[Tensor, "*layer k"]


@dataclass(frozen=True)
class Readout:
    """A linear read-out: ``prediction = bias + (x - mean) / scale @ weight``.

    Attributes
    ----------
    mean, scale : Float[Tensor, "*layer p"]
    weight : Float[Tensor, "*layer p k"]
    bias : Float[Tensor, "*layer k"]
    """

    mean: Float[Tensor, "*layer p"]
    scale: Float[Tensor, "*layer p"]
    weight: Float[Tensor, "*layer p k"]
    bias: Float[Tensor, "*layer k"]

    def __call__(self, x: Float[Tensor, "*layer n p"]) -> Float[Tensor, "*layer n k"]:
        """Predictions of rows."""
        return self.bias.unsqueeze(-2) + (x - self.mean.unsqueeze(-2)) / self.scale.unsqueeze(-2) @ self.weight


def moments(x: Float[Tensor, "*layer n p"], y: Float[Tensor, "*layer n k"]) -> Moments:
    """Moments of a block of rows, at least one."""
    x, y = x.double(), y.double()
    mean_x, mean_y = x.mean(-2), y.mean(-2)
    x, y = x - mean_x.unsqueeze(-2), y - mean_y.unsqueeze(-2)
    count = torch.tensor(float(x.shape[-2]), dtype=torch.float64, device=x.device)
    return Moments(count, mean_x, mean_y, x.mT @ x, x.mT @ y, y.square().sum(-2))


def combined(a: Moments, b: Moments) -> Moments:
    """Moments of the rows of both."""
    return _merged(a, b, 1.0)


def without(whole: Moments, part: Moments) -> Moments:
    """Moments of the rows of ``whole`` that are not in ``part``: what ``combined`` has added, taken out again."""
    return _merged(whole, part, -1.0)


def _merged(a: Moments, b: Moments, sign: float) -> Moments:
    count = a.count + sign * b.count
    share = sign * b.count / count
    dx, dy = b.mean_x - a.mean_x, b.mean_y - a.mean_y
    between = a.count * share
    return Moments(
        count,
        a.mean_x + share * dx,
        a.mean_y + share * dy,
        a.xx + sign * b.xx + between * dx.unsqueeze(-1) * dx.unsqueeze(-2),
        a.xy + sign * b.xy + between * dx.unsqueeze(-1) * dy.unsqueeze(-2),
        a.yy + sign * b.yy + between * dy.square(),
    )


def of_layers(m: Moments, layers: slice) -> Moments:
    """Moments of some of the layers (first axis)."""
    parts = {it.name: getattr(m, it.name)[layers] for it in fields(m) if it.name != "count"}
    return Moments(count=m.count, **parts)


def solve_ridge(m: Moments, ridge: float) -> Readout:
    """The read-out with the least squared error plus ``ridge`` times the squared standardised weights, per row.

    Parameters
    ----------
    m : Moments
        Of at least two rows.
    ridge : float
        ``lambda`` > 0, relative to the inputs' unit variance.
    """
    variance = m.xx.diagonal(dim1=-2, dim2=-1) / m.count
    # Rounding leaves an input that never changes a variance of about eps times its square.
    varies = variance > 1e-12 * (m.mean_x.square() + variance)
    scale = torch.where(varies, variance, 1).sqrt()
    gram = m.xx / m.count / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    gram = torch.where(varies.unsqueeze(-1) & varies.unsqueeze(-2), gram, 0)
    gram = gram + ridge * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    cross = torch.where(varies.unsqueeze(-1), m.xy / m.count / scale.unsqueeze(-1), 0)
    weight = torch.cholesky_solve(cross, torch.linalg.cholesky(gram))
    return Readout(m.mean_x, scale, weight, m.mean_y)


def squared_error(readout: Readout, m: Moments) -> Float[Tensor, "*layer k"]:
    """Mean squared error of a read-out on rows that are known by their moments."""
    weight = readout.weight / readout.scale.unsqueeze(-1)
    offset = readout.bias + ((m.mean_x - readout.mean).unsqueeze(-2) @ weight).squeeze(-2) - m.mean_y
    explained = (weight * (m.xx @ weight)).sum(-2)
    return (m.yy - 2 * (weight * m.xy).sum(-2) + explained) / m.count + offset.square()


def r_squared(readout: Readout, m: Moments) -> Float[Tensor, "*layer k"]:
    """``R^2`` on rows that are known by their moments; at most 1, negative where their own mean is the better guess.

    1 for a target that never changes and is met, 0 if it is missed.
    """
    error, variance = squared_error(readout, m), m.yy / m.count
    constant = variance <= 0
    return torch.where(constant, (error <= 0).double(), 1 - error / torch.where(constant, 1, variance))


def top_recall(predicted: Float[Tensor, "*row n"], target: Float[Tensor, "*row n"], fraction: float) -> float:
    """Share of the ``fraction`` largest targets that are among as many largest predictions, over all rows together."""
    count = max(round(fraction * target.numel()), 1)
    best = torch.zeros(target.numel(), dtype=torch.bool, device=target.device)
    best[target.flatten().topk(count).indices] = True
    return float(best[predicted.flatten().topk(count).indices].double().mean())
