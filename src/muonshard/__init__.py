"""Muon for parameters that no single rank holds: exact on any mesh, with the fewest bytes.

import muonshard
optimizer = muonshard.Muon(muonshard.param_groups(model), lr=0.02)
print(optimizer.plan)
"""

from muonshard.matrices import MatrixRule
from muonshard.optimizer import Muon
from muonshard.plan import Plan
from muonshard.routing import param_groups

__all__ = ["MatrixRule", "Muon", "Plan", "param_groups"]
__version__ = "0.1.0"
