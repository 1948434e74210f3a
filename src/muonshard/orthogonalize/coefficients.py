"""Coefficients `(a, b, c)` of the odd quintic `p(x) = a x + b x^3 + c x^5` that one Newton-Schulz step applies.

Jordan's triple maximises the slope at zero and repeats. Polar Express composes, for a given number of steps, the
quintics that together are closest to 1 on `[lower, 1]` (Amsel, Persson, Musco and Gower 2025, arXiv 2505.16932):
greedily, each is the best approximation of 1 on the interval that its predecessors map `[lower, 1]` to.
"""

from __future__ import annotations

import math

import numpy as np

Coefficients = tuple[float, float, float]

# https://kellerjordan.github.io/posts/muon/
JORDAN: Coefficients = (3.4445, -4.7750, 2.0315)
# The classical third-order iteration: slow at first, exact in the limit.
CUBIC: Coefficients = (1.5, -0.5, 0.0)
# Appendix G of the paper: no polynomial is fitted below this fraction of the largest singular value.
CUSHION = 0.02407327424182761
# Section 3.4 of the paper: bfloat16 can round a singular value to just above 1.
SAFETY = 1.01

# On an interval narrower than this, the best quintic equals its limit up to what float64 resolves.
_NARROW = 5e-6


def polar_express(
    steps: int, lower: float = 1e-3, *, cushion: float = CUSHION, safety: float = SAFETY
) -> tuple[Coefficients, ...]:
    """The optimal composition of `steps` quintics for singular values in `[lower, 1]`.

    `cushion` bounds the interval that a quintic is fitted to, `[max(l, cushion u), u]`, which keeps early polynomials
    from dipping towards zero inside it; 0 gives the composition that is optimal in exact arithmetic. `safety` replaces
    `p(x)` by `p(x / safety)`, for singular values that rounding pushes above the interval, until that is but a point;
    1 leaves the optimal coefficients. The table in the paper's appendix G is that of `steps=8` and the defaults.

    Raises ValueError for a parameter out of its range.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    if not 0 < lower <= 1:
        raise ValueError(
            f"lower={lower} must be in (0, 1]: it bounds the singular values after normalisation from below"
        )
    if not 0 <= cushion < 1:
        raise ValueError(f"cushion={cushion} must be in [0, 1)")
    if safety < 1:
        raise ValueError(f"safety={safety} must be at least 1")
    low, high = lower, 1.0
    composition = []
    for _ in range(steps):
        fitted = minimax_quintic(max(low, cushion * high), high)
        # A cushioned fit is centred around 1 on its own interval; what follows needs it centred on [low, high].
        scale = 2 / (evaluate(fitted, low) + evaluate(fitted, high))
        a, b, c = (scale * coefficient for coefficient in fitted)
        margin = safety if _is_wide(low, high) else 1.0
        composition.append((a / margin, b / margin**3, c / margin**5))
        low = evaluate((a, b, c), low)
        high = 2 - low
    return tuple(composition)


def minimax_quintic(low: float, high: float) -> Coefficients:
    """The odd quintic closest to 1 on `[low, high]`, by Remez exchange: its error equioscillates in four points."""
    if not _is_wide(low, high):
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    ratio = low / high
    inner = (3 * ratio + 1) / 4, (ratio + 3) / 4
    best, error = (0.0, 0.0, 0.0), math.inf
    for _ in range(100):
        points = np.array([ratio, *inner, 1.0])
        system = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        *solution, signed_error = np.linalg.solve(system, np.ones(4)).tolist()
        if abs(signed_error - error) <= 1e-15:
            break
        best, error = (solution[0], solution[1], solution[2]), signed_error
        inner = _extrema(best)
    a, b, c = best
    return a / high, b / high**3, c / high**5


def _is_wide(low: float, high: float) -> bool:
    return 1 - low / high >= _NARROW


def _extrema(coefficients: Coefficients) -> tuple[float, float]:
    """The two positive zeros of `p'(x) = a + 3 b x^2 + 5 c x^4`, ascending."""
    a, b, c = coefficients
    root = math.sqrt(9 * b * b - 20 * a * c)
    return math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))


def evaluate(coefficients: Coefficients, x: float) -> float:
    """`p(x)`."""
    a, b, c = coefficients
    return x * (a + x * x * (b + x * x * c))


def image(composition: tuple[Coefficients, ...], low: float, high: float) -> tuple[float, float]:
    """The interval that the composed polynomials map `[low, high]` to, exact because each of them is continuous."""
    for a, b, c in composition:
        turning = np.roots([5 * c, 0, 3 * b, 0, a])
        inside = [float(x.real) for x in turning if abs(x.imag) < 1e-12 and low < x.real < high]
        values = [evaluate((a, b, c), x) for x in (low, high, *inside)]
        low, high = min(values), max(values)
    return low, high


def steepest(coefficients: Coefficients, bound: float) -> float:
    """The largest `|p'(x)|` for `|x| <= bound`."""
    a, b, c = coefficients
    bend = -3 * b / (10 * c) if c else 0.0
    squares = [0.0, bound**2, *([bend] if 0 < bend < bound**2 else [])]
    return max(abs(a + 3 * b * x + 5 * c * x * x) for x in squares)
