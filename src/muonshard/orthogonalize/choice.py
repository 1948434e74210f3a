"""The orthogonalisers by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from torch import Tensor

from muonshard.orthogonalize.coefficients import CUBIC, JORDAN, Coefficients, polar_express
from muonshard.orthogonalize.newton_schulz import NewtonSchulz, Normalization

# As torch.optim.Muon refuses them.
MOST_STEPS = 99


class Orthogonalizer(Protocol):
    """Any callable that maps a stack of matrices `(B, m, n)` to a stack of the same shape, dtype and device."""

    def __call__(self, stack: Tensor, /) -> Tensor: ...


def resolve(
    orthogonalize: str | Callable[[Tensor], Tensor],
    *,
    coefficients: Coefficients | Sequence[Coefficients] = JORDAN,
    steps: int = 5,
    eps: float = 1e-7,
    normalize: Normalization = "frobenius",
) -> Orthogonalizer:
    """The orthogonaliser that a name stands for; a callable is returned as it is.

    "newton_schulz": `steps` steps with `coefficients`, one `(a, b, c)` for all or one for each.
    "polar_express": `steps` steps with the coefficients that are optimal for singular values in `[1e-3, 1]`.
    "cubic": `steps` steps of `X <- 1.5 X - 0.5 X X^T X`.

    Raises ValueError for anything else, and for coefficients given to a name that has its own.
    """
    if callable(orthogonalize):
        return orthogonalize
    if orthogonalize not in ("newton_schulz", "polar_express", "cubic"):
        raise ValueError(
            f"orthogonalize={orthogonalize!r} is unknown: use 'newton_schulz', 'polar_express', 'cubic' or a callable"
        )
    if not 0 <= steps <= MOST_STEPS:
        raise ValueError(f"steps={steps} must be between 0 and {MOST_STEPS}")
    per_step = _per_step(coefficients, steps)
    if orthogonalize != "newton_schulz":
        if any(triple != JORDAN for triple in per_step):
            raise ValueError(
                f"coefficients={coefficients} would be ignored, as {orthogonalize!r} has its own: "
                "leave them out, or use orthogonalize='newton_schulz'"
            )
        per_step = polar_express(steps) if orthogonalize == "polar_express" else (CUBIC,) * steps
    return NewtonSchulz(per_step, eps, normalize)


def flops(orthogonalizer: Callable[[Tensor], Tensor], m: int, n: int) -> int:
    """FLOPs for one `(m, n)` matrix: by the orthogonaliser's own `flops(m, n)`, else those of the standard form."""
    own = getattr(orthogonalizer, "flops", None)
    if own is not None:
        return int(own(m, n))
    m, n = min(m, n), max(m, n)
    return 5 * (4 * m * m * n + 2 * m**3)


def _per_step(coefficients: Coefficients | Sequence[Coefficients], steps: int) -> tuple[Coefficients, ...]:
    """One triple of floats for each step, from one for all or one for each."""
    try:
        if all(isinstance(entry, int | float) for entry in coefficients):
            per_step = [cast(Coefficients, coefficients)] * steps
        else:
            per_step = list(cast(Sequence[Coefficients], coefficients))
        triples = tuple((float(a), float(b), float(c)) for a, b, c in per_step)
    except (TypeError, ValueError):
        raise ValueError(
            f"coefficients={coefficients!r} must be three numbers (a, b, c), or that for each step"
        ) from None
    if len(triples) != steps:
        raise ValueError(
            f"coefficients has {len(triples)} triples for steps={steps}: give one triple, or one for each step"
        )
    return triples
