r"""How good a kept set can be when its softmax weights are forced: attention over it is the renormalised average.

One attention row has masses ``p`` (positive, sum 1) over points ``v`` with mean ``mu = sum p v``, its dense output.
With ``u_j = p_j (v_j - mu)`` a kept set ``A`` misses the dense output by ::

    es(A) = |g_A| / p(A)      g_A = sum_A u      p(A) = sum_A p      since the average over A is mu + g_A / p(A)
    m_s   = 1 - p(A_s)        dropped mass; A_s, *top mass*, holds the s largest masses
    Phi   = |g_{A_s}|
    ES    = min es(A) over all A of size s. Deciding ES = 0 is NP-complete (a partition problem)
    kappa = es(A_s) / ES >= 1, and c = 1 - ES / es(A_s): the share of the gap that a better set of that size closes
    EF    = min over A of the distance from mu to the hull of A's points: the weights of the kept set are free

with ``ES <= es(A_s) <= 2 max_j |v_j - mu| m_s``. ``ES`` is replaced by ``ES_pool``, its exact minimum over the subsets
of a *candidate pool*: top mass and the ``e`` other keys of largest ``|u_j|``; so every gap found is a lower bound.
(docs/papers.md says which section of the text each of these is from.)

All of it in float64. Shapes: ``r`` rows, ``n`` keys, ``c`` candidates, ``s`` kept keys, ``d`` coordinates.
"""

from dataclasses import dataclass
from itertools import combinations, islice

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

EXTRA = {4: 24, 8: 12, 16: 6, 32: 4}
"""Candidates beside top mass by budget: 20,475, 125,970, 74,613 and 58,905 subsets."""
ROUNDING = 2.0**-50
"""An error below this share of the points' size is what float64 leaves of 0."""
CHUNK = 8192
"""Subsets of which all rows' errors are held at a time."""


@dataclass(frozen=True)
class AttentionRows:
    """Attention rows, or their restriction to some keys.

    Attributes
    ----------
    masses : Float[Tensor, "r n"]
        float64; zero for keys that a row does not see.
    points : Float[Tensor, "r n d"]
        ``v_j - mu`` of the whole row.
    rounding : Float[Tensor, "r"]
        The largest error that rounding alone explains.
    """

    masses: Float[Tensor, "r n"]
    points: Float[Tensor, "r n d"]
    rounding: Float[Tensor, " r"]

    def at(self, keys: Int[Tensor, "r c"]) -> "AttentionRows":
        """The rows restricted to some of their keys; masses still refer to the whole row."""
        points = self.points.gather(1, keys.unsqueeze(-1).expand(-1, -1, self.points.shape[-1]))
        return AttentionRows(self.masses.gather(1, keys), points, self.rounding)

    @property
    def deviations(self) -> Float[Tensor, "r n d"]:
        """``u_j = p_j (v_j - mu)``."""
        return self.masses.unsqueeze(-1) * self.points

    @property
    def radius(self) -> Float[Tensor, " r"]:
        """``max_j |v_j - mu|`` over the keys that a row sees."""
        return torch.where(self.masses > 0, self.points.norm(dim=-1), 0).amax(-1)


def attention_rows(masses: Float[Tensor, "r n"], values: Float[Tensor, "... n d"]) -> AttentionRows:
    """Rows from masses and values; ``values`` may be shared by all rows.

    Raises
    ------
    ValueError
        If masses are negative, or those of a row do not sum to 1.
    """
    masses, values = masses.double(), values.double()
    total = masses.sum(-1)
    if not ((masses >= 0).all() and ((total - 1).abs() < 1e-5).all()):
        raise ValueError(f"masses must be non-negative and sum to 1 in every row, got sums {total.tolist()}")
    masses = masses / total.unsqueeze(-1)
    mean = masses.unsqueeze(1) @ values
    size = (masses.unsqueeze(1) @ values.norm(dim=-1, keepdim=True)).flatten()
    return AttentionRows(masses, values - mean, ROUNDING * size)


def top_mass(masses: Float[Tensor, "r n"], s: int) -> Int[Tensor, "r s"]:
    """Keys of the ``s`` largest masses, the largest first, the earlier of two equal ones first.

    Raises
    ------
    ValueError
        Unless ``1 <= s <= n``.
    """
    if not 1 <= s <= masses.shape[1]:
        raise ValueError(f"s must be in [1, {masses.shape[1]}], the number of keys, got {s}")
    return masses.sort(dim=-1, descending=True, stable=True).indices[:, :s]


def group_vote(masses: Float[Tensor, "r n"], s: int) -> Int[Tensor, " s"]:
    """The one kept set of a group of rows: the ``s`` keys of largest mass summed over the rows."""
    return top_mass(masses.sum(0, keepdim=True), s)[0]


def forced_error(rows: AttentionRows, kept: Int[Tensor, "r s"]) -> Float[Tensor, " r"]:
    """``es(A)``; 0 where rounding alone explains what is left."""
    return _error(rows.at(kept).deviations.sum(1).norm(dim=-1), rows.masses.gather(1, kept).sum(-1), rows.rounding)


def _error(size: Tensor, mass: Tensor, rounding: Tensor) -> Tensor:
    error = size / mass
    return torch.where(error > rounding, error, 0)


def dropped_mass(masses: Float[Tensor, "r n"], kept: Int[Tensor, "r s"]) -> Float[Tensor, " r"]:
    """``1 - p(A)``, summed over what is dropped: exact for tiny rests."""
    return masses.scatter(1, kept, 0).sum(-1)


def deviation_norm(rows: AttentionRows, kept: Int[Tensor, "r s"]) -> Float[Tensor, " r"]:
    """``|g_A|``; ``Phi`` for top mass. One pass over the keys, no search."""
    return rows.at(kept).deviations.sum(1).norm(dim=-1)


def candidate_pool(rows: AttentionRows, s: int, extra: int) -> Int[Tensor, "r c"]:
    """Top mass first, then the ``extra`` other keys with the largest ``|u_j|``: fewer if some row does not see so many.

    Raises
    ------
    ValueError
        If a row sees fewer than ``s`` keys.
    """
    seen = int((rows.masses > 0).sum(-1).min())
    if seen < s:
        raise ValueError(f"rows must see at least s = {s} keys, got one that sees {seen}")
    top = top_mass(rows.masses, s)
    single = rows.deviations.norm(dim=-1).scatter(1, top, -1)
    # A key with mass comes before one without, whose deviation is 0 as well.
    order = torch.where(rows.masses > 0, single, -1).sort(dim=-1, descending=True, stable=True).indices
    return torch.cat((top, order[:, : min(extra, seen - s)]), 1)


def best_subset(pool: AttentionRows, s: int) -> tuple[Float[Tensor, " r"], Int[Tensor, "r s"]]:
    """``ES_pool``: the smallest ``es`` over all subsets of size ``s`` of the candidates.

    ``|g_A|^2 = 1' G 1`` with the Gram matrix of the candidates' ``u`` is linear in G, so the subsets' indicator
    products meet all rows' Gram matrices in one matrix product. The winner's error is computed from its own sum: the
    Gram matrix loses half of the digits of an error near 0.

    Returns
    -------
    error : Float[Tensor, "r"]
    kept : Int[Tensor, "r s"]
        Places in the pool.
    """
    (r, candidates), device = pool.masses.shape, pool.masses.device
    deviations = pool.deviations
    gram = deviations @ deviations.mT
    first, second = torch.triu_indices(candidates, candidates, device=device)
    pairs = (gram[:, first, second] * torch.where(first == second, 1.0, 2.0)).mT
    best = torch.full_like(pool.rounding, torch.inf)
    top = torch.arange(s, device=device).repeat(r, 1)
    winner = top
    every = combinations(range(candidates), s)
    while chunk := list(islice(every, CHUNK)):
        subsets = torch.tensor(chunk, device=device)
        member = torch.zeros(len(subsets), candidates, dtype=gram.dtype, device=device).scatter_(1, subsets, 1)
        squared = ((member[:, first] * member[:, second]) @ pairs).clamp_(min=0)
        ratio, place = (squared / (member @ pool.masses.mT).square_()).min(0)
        winner = torch.where((ratio < best).unsqueeze(1), subsets[place], winner)
        best = torch.minimum(ratio, best)
    error, top_error = forced_error(pool, winner), forced_error(pool, top)
    lower = error < top_error
    return torch.where(lower, error, top_error), torch.where(lower.unsqueeze(1), winner, top)


def balance(pool: AttentionRows, s: int) -> tuple[Float[Tensor, " r"], Int[Tensor, "r s"], Int[Tensor, " r"]]:
    """The balancing selector: from top mass on, swap the kept and the dropped candidate that lower ``es`` most, until
    no swap lowers it.

    Returns
    -------
    error : Float[Tensor, "r"]
    kept : Int[Tensor, "r s"]
        Places in the pool, in increasing order.
    swaps : Int[Tensor, "r"]
    """
    (r, candidates), device = pool.masses.shape, pool.masses.device
    deviations, masses = pool.deviations, pool.masses
    gram = deviations @ deviations.mT
    own = gram.diagonal(dim1=1, dim2=2)
    kept = (torch.arange(candidates, device=device) < s).repeat(r, 1)
    error = forced_error(pool, _places(kept, s))
    swaps = torch.zeros(r, dtype=torch.int64, device=device)
    going = error > 0
    while going.any():
        total = torch.where(kept.unsqueeze(-1), deviations, 0).sum(1)
        along = (deviations @ total.unsqueeze(-1)).squeeze(-1)
        mass = torch.where(kept, masses, 0).sum(-1)
        # |g - u_i + u_j|^2 and p(A) - p_i + p_j: i leaves, j comes.
        squared = total.square().sum(-1)[:, None, None] - 2 * gram
        squared = squared + (own - 2 * along).unsqueeze(2) + (own + 2 * along).unsqueeze(1)
        ratio = squared.clamp(min=0) / (mass[:, None, None] - masses.unsqueeze(2) + masses.unsqueeze(1)).square()
        allowed = kept.unsqueeze(2) & ~kept.unsqueeze(1)
        place = torch.where(allowed, ratio, torch.inf).flatten(1).argmin(1, keepdim=True)
        swapped = kept.scatter(1, place // candidates, False).scatter(1, place % candidates, True)
        # Compared by its own sum, which is what makes the loop end.
        attempt = forced_error(pool, _places(torch.where(going.unsqueeze(1), swapped, kept), s))
        going = going & (attempt < error)
        kept = torch.where(going.unsqueeze(1), swapped, kept)
        error = torch.where(going, attempt, error)
        swaps += going
    return error, _places(kept, s), swaps


def _places(kept: Bool[Tensor, "r c"], s: int) -> Int[Tensor, "r s"]:
    return kept.nonzero()[:, 1].view(-1, s)


def gap_ratio(top: Float[Tensor, " r"], best: Float[Tensor, " r"]) -> Float[Tensor, " r"]:
    """``kappa = es(A_s) / ES``; 1 where top mass has no error, infinite where only the best set has none."""
    return torch.where(top > 0, top / best, 1)


def closable_share(top: Float[Tensor, " r"], best: Float[Tensor, " r"]) -> Float[Tensor, " r"]:
    """``c = 1 - ES / es(A_s)``; 0 where top mass has no error."""
    return torch.where(top > 0, 1 - best / top, 0)


def free_weight_error(rows: AttentionRows, s: int, polish: int = 32) -> Float[Tensor, " r"]:
    """An upper estimate of ``EF(s)`` by Frank and Wolfe's algorithm on the simplex, with exact line search.

    From the point next to the mean, ``s - 1`` steps reach at most ``s`` points; ``polish`` more steps among these only
    solve their weights again.
    """
    seen = rows.masses > 0
    distance = torch.where(seen, rows.points.norm(dim=-1), torch.inf)
    chosen = distance.argmin(-1, keepdim=True)
    support = torch.zeros_like(seen).scatter(1, chosen, True)
    current = rows.at(chosen).points.squeeze(1)
    for step in range(s - 1 + polish):
        allowed = seen if step < s - 1 else support
        slope = (rows.points @ current.unsqueeze(-1)).squeeze(-1)
        chosen = torch.where(allowed, slope, torch.inf).argmin(-1, keepdim=True)
        support = support.scatter(1, chosen, True)
        direction = current - rows.at(chosen).points.squeeze(1)
        length = direction.square().sum(-1)
        share = ((current * direction).sum(-1) / torch.where(length > 0, length, 1)).clamp(0, 1)
        current = current - share.unsqueeze(-1) * direction
    return current.norm(dim=-1)


def weighted_error(
    rows: AttentionRows, probability: Float[Tensor, "r n"], kept: Bool[Tensor, "*draws r n"]
) -> Float[Tensor, "*draws r"]:
    """Error of the self-normalised estimator whose kept keys count ``1 / P(kept)`` times: weights are not forced."""
    weights = torch.where(kept, rows.masses / probability, 0)
    size = torch.einsum("...rn,rnd->...rd", weights, rows.points).norm(dim=-1)
    return _error(size, weights.sum(-1), rows.rounding)
