"""Which parameters of a model Muon takes, which go to AdamW, and why."""

from muonshard.routing.decisions import Decision, ParamGroups
from muonshard.routing.groups import GroupOptions, param_groups
from muonshard.routing.selection import Selector
from muonshard.routing.splits import Known

__all__ = ["Decision", "GroupOptions", "Known", "ParamGroups", "Selector", "param_groups"]
