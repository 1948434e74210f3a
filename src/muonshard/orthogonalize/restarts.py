"""Where to restart the Gram form: standard Newton-Schulz is the case of a restart after every step.

A *segment* of L steps forms `R = X X^T` once, accumulates `Q <- Z Q` and `R <- Z R Z` on the small side, where
`Z = a I + b R + c R^2`, and applies `X <- Q X` once (Zhang, Amsel, Chen and Dao 2026). Fewer segments cost less when
`2 n > 3 m`. Longer ones lose accuracy: a further step multiplies rounding in R by the square of what it multiplies a
small change of X by, and the standard form rounds only X from one step to the next.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from muonshard.orthogonalize.coefficients import Coefficients, image, steepest


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a segment may multiply rounding in its R by, in all its steps but the last.

    `first` is for a first segment that others follow and that starts from the Frobenius norm: there R is small, hence
    its rounding. `later` is for any other.
    """

    first: float
    later: float


# Just above what Jordan's coefficients ask for: two steps (141) and one (15.8). With these the error against float64 is
# not above the standard form's; tests/orthogonalize/test_accuracy.py holds each entry to it. They are ratios of one
# rounding error to another, so they come out alike for every dtype.
LIMITS = {
    torch.bfloat16: Limits(first=150.0, later=17.0),
    torch.float32: Limits(first=150.0, later=17.0),
    torch.float64: Limits(first=150.0, later=17.0),
}

# Below this many rows the small side's products cost less than the calls that make them, and more calls do not pay.
FEWEST_ROWS = 64


def restarts(
    m: int, n: int, coefficients: Sequence[Coefficients], dtype: torch.dtype, normalize: str = "frobenius"
) -> tuple[int, ...]:
    """The steps `k` before which R is formed afresh, `0 < k < K`, for an `(m, n)` matrix iterated in `dtype`.

    All of them where that is cheapest; else the fewest that keep within `LIMITS`, and of these sets the one that stays
    furthest below. It depends on nothing but the arguments, so all ranks agree on it.
    """
    m, n = min(m, n), max(m, n)
    if m < FEWEST_ROWS or 2 * n <= 3 * m:
        return tuple(range(1, len(coefficients)))
    limits = LIMITS[dtype]
    if normalize != "frobenius":
        limits = Limits(limits.later, limits.later)
    lengths = _segment_lengths(tuple(coefficients), limits)
    return tuple(itertools.accumulate(lengths[:-1]))


def segments(steps: int, restarts: Sequence[int]) -> list[range]:
    """The ranges of steps between restarts."""
    return [range(start, stop) for start, stop in itertools.pairwise([0, *restarts, steps]) if start < stop]


@functools.cache
def _segment_lengths(coefficients: tuple[Coefficients, ...], limits: Limits) -> tuple[int, ...]:
    steps = len(coefficients)
    at_zero = [a * a for a, _, _ in coefficients]
    anywhere = _gains(coefficients)

    @functools.cache
    def best(start: int) -> tuple[int, float, tuple[int, ...]]:
        """Number of segments, the largest share of its limit that one uses, and negated lengths, from `start` on."""
        if start == steps:
            return 0, 0.0, ()
        candidates = []
        for stop in range(start + 1, steps + 1):
            is_first = start == 0 and stop < steps
            gain = math.prod((at_zero if start == 0 else anywhere)[start : stop - 1])
            share = gain / (limits.first if is_first else limits.later)
            if stop == start + 1 or share <= 1:
                count, largest, lengths = best(stop)
                candidates.append((count + 1, max(share, largest), (start - stop, *lengths)))
        return min(candidates)

    return tuple(-length for length in best(0)[2])


def _gains(coefficients: Sequence[Coefficients]) -> list[float]:
    """For each step, the square of its polynomial's steepest slope on what the steps before it map `[0, 1]` to."""
    low, high = 0.0, 1.0
    gains = []
    for triple in coefficients:
        if max(-low, high) > 10:  # The steps diverge: no limit holds, and all are restarts.
            gains.append(math.inf)
            continue
        gains.append(steepest(triple, max(-low, high)) ** 2)
        low, high = image((triple,), low, high)
    return gains
