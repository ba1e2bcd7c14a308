"""How the ``append`` kernel is launched: a pure function of shape."""

from dataclasses import dataclass

from kvpress_prob.ops.launching import next_power_of_two


@dataclass(frozen=True)
class LaunchConfig:
    """One program writes one segment's entries, ``block_n`` at a time.

    Attributes
    ----------
    block_n : int
        Entries of a block.
    block_d, block_dv : int
        Widths of keys and values, rounded up to a power of two.
    num_warps : int
    """

    block_n: int
    block_d: int
    block_dv: int
    num_warps: int


def launch_config(n: int, head_dim: int, value_dim: int) -> LaunchConfig:
    """Configuration for ``n`` new entries a segment: one entry, or blocks of 16."""
    return LaunchConfig(1 if n == 1 else 16, next_power_of_two(head_dim), next_power_of_two(value_dim), num_warps=4)
