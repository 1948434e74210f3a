"""Orthogonalisation of stacks of matrices. Knows nothing of ranks or parameters."""

from muonshard.orthogonalize.choice import Orthogonalizer, flops, resolve
from muonshard.orthogonalize.coefficients import CUBIC, JORDAN, Coefficients, polar_express
from muonshard.orthogonalize.newton_schulz import NewtonSchulz

__all__ = ["CUBIC", "JORDAN", "Coefficients", "NewtonSchulz", "Orthogonalizer", "flops", "polar_express", "resolve"]
