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
from dataclasses import dataclass, replace

import torch

from muonshard.orthogonalize.coefficients import Coefficients, image, steepest


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a segment may multiply rounding in its R by, in all its steps but the last.

    `first` is for a first segment that others follow and that starts from the Frobenius norm: there R is small, and so
    is its rounding. `later` is for any other, and those of several steps lie within the last `tail` steps: what they
    overshoot by must not be left to many steps more.
    """

    first: float
    later: float
    tail: float


# Jordan's coefficients multiply by 11.9 or 15.8 a step, which these just allow once, and in float32 twice at first. The
# error against float64 is then not above the standard form's in bfloat16, and in float32 at most 1.25 of it, both some
# 1e-5: tests/orthogonalize/test_newton_schulz.py holds each entry to that over spectra. In bfloat16 more would do for
# most matrices, but where rounding does not average out, as in block-diagonal ones, it makes R indefinite enough for
# the iteration to diverge.
LIMITS = {
    torch.bfloat16: Limits(first=17.0, later=17.0, tail=3),
    torch.float32: Limits(first=150.0, later=17.0, tail=math.inf),
    torch.float64: Limits(first=150.0, later=17.0, tail=math.inf),
}

# The fewest rows, and columns per row, from which fewer restarts measure faster on a CPU: one segment less saves
# `4 m^2 n - 6 m^3` FLOPs, but its small-side calls and passes over memory cost more, above all where products are fast.
PAYS_FROM = {torch.bfloat16: (256, 2.5), torch.float32: (128, 2.0), torch.float64: (128, 2.0)}


def restarts(
    m: int, n: int, coefficients: Sequence[Coefficients], dtype: torch.dtype, normalize: str = "frobenius"
) -> tuple[int, ...]:
    """The steps `k` before which R is formed afresh, `0 < k < K`, for an `(m, n)` matrix iterated in `dtype`.

    All of them where that is fastest; else the fewest that keep within `LIMITS`, and of these sets the one that stays
    furthest below. It depends on nothing but the arguments, so all ranks agree on it.
    """
    m, n = min(m, n), max(m, n)
    rows, columns_per_row = PAYS_FROM[dtype]
    if m < rows or n < columns_per_row * m:
        return tuple(range(1, len(coefficients)))
    limits = LIMITS[dtype]
    if normalize != "frobenius":
        limits = replace(limits, first=limits.later)
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
            gain = math.prod((anywhere if start else at_zero)[start : stop - 1])
            share = gain / (limits.later if start or stop == steps else limits.first)
            if stop == start + 1 or (share <= 1 and (start == 0 or start >= steps - limits.tail)):
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
