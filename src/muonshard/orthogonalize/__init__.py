"""Orthogonalisation of stacks of matrices. Knows nothing of ranks or parameters."""

from muonshard.orthogonalize.newton_schulz import JORDAN, NewtonSchulz, Orthogonalizer, flops, resolve

__all__ = ["JORDAN", "NewtonSchulz", "Orthogonalizer", "flops", "resolve"]
