"""What a compression did: ``press.report``."""

from dataclasses import dataclass, field

from torch import Tensor

from kvpress_prob.maths.arguments import check_integer
from kvpress_prob.ragged.store import MAX_GROWTH


@dataclass(frozen=True)
class CompressionReport:
    """Figures of one compressed prefill.

    Attributes
    ----------
    target_ratio : float
        Wanted fraction of evicted entries, over full-attention layers.
    context_lengths : list of int
        Tokens of each batch row, padding not counted.
    layers : list of int
        Indices of the compressed (full-attention) layers.
    kept : Int[Tensor, "layers b hkv"]
        Entries kept by each head; int64 on the CPU.
    effective : Float[Tensor, "layers b hkv"]
        Kish's effective sample size of the kept entries' weights, at most ``kept``.
    draws : Int[Tensor, "layers b hkv"] or None
        Number of draws of every head; None for the systematic sampler.
    bytes_before, bytes_after : int
        Bytes of the whole cache, sliding-window layers included, measured on its storages.
    bytes_per_token : int
        Bytes that a further token adds to it in all, weights included.
    seed : int or None
        Seed of the draw: pass it as ``seed=`` to repeat it. None when nothing is drawn.
    dropped_mass : Float[Tensor, "layers b hkv"] or None
        Attention of the newest 32 rows that falls on evicted entries, mean over rows and a group's query heads; None
        unless the press has ``measure_dropped_mass`` and evicted something. A diagnostic, not an allocator.
    """

    target_ratio: float
    context_lengths: list[int]
    layers: list[int]
    kept: Tensor
    effective: Tensor
    draws: Tensor | None
    bytes_before: int
    bytes_after: int
    bytes_per_token: int
    seed: int | None
    dropped_mass: Tensor | None = None
    settings: str = field(default="", repr=False)

    @property
    def entries(self) -> int:
        """Entries of the compressed layers before eviction, padding not counted."""
        return sum(self.context_lengths) * self.kept.shape[0] * self.kept.shape[2]

    @property
    def achieved_ratio(self) -> float:
        """Fraction of entries that were evicted.

        The systematic sampler is off the target by at most one entry a head. The multinomial one hits it on average,
        to half an entry a head; of ``n`` entries its standard deviation is at most ``sqrt(r (1 - r) / n)``. Both keep
        more than the target where a head would be left empty or protected entries exceed the budget, and less where
        fewer entries have a score above 0.
        """
        return 1 - int(self.kept.sum()) / self.entries if self.entries else 0.0

    @property
    def layer_ratios(self) -> list[float]:
        """Fraction of evicted entries of each compressed layer."""
        per_layer = sum(self.context_lengths) * self.kept.shape[2]
        return (1 - self.kept.sum((1, 2)).double() / per_layer).tolist()

    def bytes_while_decoding(self, tokens: int) -> int:
        """Most bytes that the cache holds after ``tokens`` further tokens of every row, where no ``CacheBudget`` holds
        it: a store makes room for at most 256 entries a head at a time. While a layer grows, its old store is there
        too. Raises ``ValueError`` unless ``tokens`` is an integer >= 0."""
        check_integer("tokens", tokens, 0)
        return self.bytes_after + (tokens + MAX_GROWTH) * self.bytes_per_token

    @property
    def effective_fraction(self) -> float:
        """Effective sample size of all heads' weights over the kept entries."""
        return float(self.effective.sum() / self.kept.sum().clamp(min=1))

    @property
    def padded_ratio(self) -> float:
        """Entries that caches with one length for all heads of a layer would hold, over kept entries."""
        padded = self.kept.amax(-1) * self.kept.shape[2] if self.kept.numel() else self.kept
        return int(padded.sum()) / max(int(self.kept.sum()), 1)

    def __str__(self) -> str:
        kept = self.kept.double()
        lines = [
            f"compressed {self.context_lengths} tokens, {len(self.layers)} layers x {self.kept.shape[2]} KV heads",
            f"  press    {self.settings}",
            f"  ratio    target {self.target_ratio:.4f}, achieved {self.achieved_ratio:.4f}",
            f"  kept     {int(kept.sum())} of {self.entries} entries"
            + (
                f"; per head {int(kept.min())} to {int(kept.max())}, median {int(kept.median())}"
                if kept.numel()
                else ""
            ),
            f"  padded   {self.padded_ratio:.2f} times as many, if a layer had one length for all heads",
            f"  memory   {self.bytes_before / 1e6:.2f} MB -> {self.bytes_after / 1e6:.2f} MB"
            + f"; {self.bytes_per_token / 1e3:.2f} kB a further token",
            f"  weights  effective sample size {self.effective_fraction:.1%} of kept"
            + ("" if self.seed is None else f"; seed {self.seed}"),
        ]
        if self.draws is not None:
            lines.append(f"  draws    {int(self.draws.min())} to {int(self.draws.max())} a head")
        if self.dropped_mass is not None:
            median, most = float(self.dropped_mass.median()), float(self.dropped_mass.max())
            lines.append(f"  dropped  attention of the newest rows, per head: median {median:.1%}, at most {most:.1%}")
        return "\n".join(lines)
