"""What `load_state_dict` does: a saved state, of this optimizer or of torch's, fitted to the parameters of this run.

Parameters are found by name where both sides have names, else by their place in their group. Everything is looked at
before anything changes.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from muonshard import _torch
from muonshard.meshes import is_distributed
from muonshard.precision import MASTER, Precision
from muonshard.survey import UNSPLIT, Group, names_of

REQUIRED = {"muon": ("momentum_buffer",), "adamw": ("step", "exp_avg", "exp_avg_sq")}
"""What a parameter's state must have, by the algorithm of its group."""

OWN = ("params", "param_names", "algorithm", *UNSPLIT)
"""What a group keeps: how parameters are read as matrices is the model's business, not the saved state's."""

SHOWN = 8
"""So many names at most in a message."""


@dataclass(frozen=True)
class Source:
    """Where a group's state is: the options of the saved group, and a saved id for each parameter (None if missing)."""

    options: Group
    ids: tuple[Hashable, ...]


@dataclass
class Fitted:
    """A saved state as this run takes it up, and what there is to tell."""

    state: defaultdict[Any, dict[str, Any]]
    groups: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def load_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], precision: Precision) -> None:
    """`optimizer.load_state_dict(saved)`: hooks are run, what starts fresh is listed in a warning.

    Raises:
        ValueError: groups cannot be matched, or entries are missing or misshapen; it names them, and nothing changes.
    """
    before, after = _torch.load_hooks(optimizer)
    saved = dict(saved)
    for before_hook in before:
        saved = before_hook(optimizer, saved) or saved
    fitted = fit_state(optimizer.param_groups, optimizer.state, saved, precision)
    optimizer.__setstate__({"state": fitted.state, "param_groups": fitted.groups})
    if fitted.notes:
        warnings.warn("; ".join(fitted.notes), UserWarning, stacklevel=3)
    for after_hook in after:
        after_hook(optimizer)


def fit_state(
    groups: Sequence[Group], state: Mapping[Tensor, Any], saved: Mapping[str, Any], precision: Precision
) -> Fitted:
    """What the optimizer's groups and state become by loading `saved`; `groups` and `state` stay as they are.

    Groups that are not in `saved` keep the options and the state that they have.

    Raises:
        ValueError: see `load_state`.
    """
    entries = saved["state"]
    sources = find_sources(groups, saved["param_groups"])
    ids = {id_ for group in saved["param_groups"] for id_ in group["params"]}
    taken = {id_ for source in sources if source is not None for id_ in source.ids}
    fitted = Fitted(defaultdict(dict, {key: value for key, value in entries.items() if key not in ids}))
    for index, (group, source) in enumerate(zip(groups, sources, strict=True)):
        if source is None or algorithm_of(source.options) != group["algorithm"]:
            fitted.groups.append(group)
            fitted.state |= {param: state[param] for param in group["params"] if state.get(param)}
            if not any(state.get(param) for param in group["params"]) and group["params"]:
                names = _list(names_of(group, f"group {index}"))
                fitted.notes.append(f"group {index} ({names}) starts fresh: {_why(source)}")
            continue
        own: Group = {key: group[key] for key in OWN if key in group}
        options = {key: deepcopy(value) for key, value in source.options.items() if key != "param_names"}
        fitted.groups.append({**group, **options, **own})
        _fit_group(fitted, index, source, entries, precision)
    unused = [name for name, id_ in _saved_names(saved["param_groups"]) if id_ not in taken]
    if unused:
        fitted.notes.append(f"no parameter takes the saved state of {_list(unused)}")
    if fitted.problems:
        raise ValueError("the state cannot be loaded: " + "; ".join(fitted.problems))
    return fitted


def find_sources(groups: Sequence[Group], saved: Sequence[Group]) -> list[Source | None]:
    """For each group, where its state is found; None if it is not in `saved`.

    Raises:
        ValueError: groups do not match; the message says what to do.
    """
    return _by_name(groups, saved) or _by_place(groups, saved)


def algorithm_of(group: Group) -> str:
    """The algorithm that a saved group is for.

    Raises:
        ValueError: it is of another optimizer.
    """
    if "algorithm" in group:
        return str(group["algorithm"])
    if "betas" in group:
        return "adamw"
    if "ns_steps" in group:
        return "muon"
    raise ValueError(f"a saved group is neither Muon's nor AdamW's: its options are {', '.join(sorted(group))}")


def _by_name(groups: Sequence[Group], saved: Sequence[Group]) -> list[Source | None] | None:
    """Sources by parameter name; None where one side has no names, or none in common."""
    if not all("param_names" in group for group in groups if group["params"]):
        return None
    ours = [group.get("param_names", []) for group in groups]
    for names in (_ids_as_names(saved), [group.get("param_names", []) for group in saved]):
        places = {
            name: (index, id_)
            for index, group in enumerate(saved)
            for name, id_ in zip(names[index], group["params"], strict=False)
        }
        if any(name in places for group_names in ours for name in group_names):
            return [_gather(index, group_names, places, saved) for index, group_names in enumerate(ours)]
    return None


def _ids_as_names(saved: Sequence[Group]) -> list[list[Any]]:
    """torch.distributed.checkpoint calls parameters by name where optimizers count them."""
    return [[id_ for id_ in group["params"] if isinstance(id_, str)] for group in saved]


def _gather(
    index: int, names: Sequence[str], places: Mapping[str, tuple[int, Hashable]], saved: Sequence[Group]
) -> Source | None:
    """The source of one group, whose parameters may come from several saved groups if these have equal options."""
    found = [places.get(name, (None, None)) for name in names]
    origins = list(dict.fromkeys(origin for origin, _ in found if origin is not None))
    if not origins:
        return None
    options = [{k: v for k, v in saved[origin].items() if k not in ("params", "param_names")} for origin in origins]
    for key in options[0].keys() | set().union(*options):
        values = [other.get(key) for other in options]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"the state cannot be loaded: group {index} has parameters of saved groups {origins}, whose {key} "
                f"differ ({', '.join(map(repr, values))}): group parameters as they were, or make the options equal"
            )
    return Source(options[0], tuple(id_ for _, id_ in found))


def _by_place(groups: Sequence[Group], saved: Sequence[Group]) -> list[Source | None]:
    """Sources by place: the n-th group of an algorithm is the n-th saved; None where no group of it was saved."""
    sources: list[Source | None] = [None] * len(groups)
    for algorithm in ("muon", "adamw"):
        mine = [index for index, group in enumerate(groups) if group["algorithm"] == algorithm]
        theirs = [group for group in saved if algorithm_of(group) == algorithm]
        if not theirs:
            continue
        sizes, saved_sizes = [len(groups[index]["params"]) for index in mine], [len(g["params"]) for g in theirs]
        if sizes != saved_sizes:
            raise ValueError(
                f"the state cannot be loaded: it has {algorithm} groups of {saved_sizes} parameters, the optimizer of "
                f"{sizes}. Give both optimizers named parameters, and they are matched by name"
            )
        for index, group in zip(mine, theirs, strict=True):
            sources[index] = Source({k: v for k, v in group.items() if k != "params"}, tuple(group["params"]))
    return sources


def _fit_group(fitted: Fitted, index: int, source: Source, entries: Mapping[Any, Any], precision: Precision) -> None:
    """Fit the saved entries of the last group in `fitted`, whose parameters are found under `source.ids`."""
    group = fitted.groups[-1]
    stepped = any(entries.get(id_) for id_ in source.ids)
    fresh: list[str] = []
    made, lost = [], []
    for name, param, id_ in zip(names_of(group, f"group {index}"), group["params"], source.ids, strict=True):
        entry = dict(entries.get(id_) or {})
        if not entry:
            if id_ is None or (stepped and param.requires_grad and group["algorithm"] == "muon"):
                fitted.problems.append(f"{name} has no saved state, others of its group have")
            elif stepped and param.requires_grad:
                fresh.append(name)  # torch's AdamW makes no state for a parameter that never had a gradient
            continue
        wanted = REQUIRED[group["algorithm"]] + (("max_exp_avg_sq",) if group.get("amsgrad") else ())
        missing = [key for key in wanted if key not in entry]
        fitted.problems += [f"{name} has no saved {key}" for key in missing]
        if precision.has_master(param) and MASTER not in entry:
            made.append(name)
        elif not precision.has_master(param) and entry.pop(MASTER, None) is not None:
            lost.append(name)
        fitted.state[param] = {}
        for key, value in entry.items():
            try:
                fitted.state[param][key] = _fit_entry(key, value, param, group, precision)
            except ValueError as error:
                fitted.problems.append(f"{name} has a saved {key} {error}")
    for names, note in [
        (fresh, f"of group {index} start fresh: no state was saved for them"),
        (made, "have no saved float32 weights: they are made of the parameters"),
        (lost, "have saved float32 weights, which are not used without master_weights"),
    ]:
        if names:
            fitted.notes.append(f"{_list(names)} {note}")


def _fit_entry(key: str, value: Any, param: Tensor, group: Group, precision: Precision) -> Any:
    """A saved entry on the parameter's device, in the dtype and placements in which this run keeps it."""
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        on_device = group.get("capturable") or group.get("fused")
        return value.to(dtype=torch.float32, device=param.device) if on_device else value
    if value.shape != param.shape:
        raise ValueError(f"of shape {tuple(value.shape)}, the parameter has {tuple(param.shape)}")
    value = value.to(dtype=precision.dtype_of(key, param), device=param.device)
    if is_distributed(param) and not is_distributed(value):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
    placements, expected = (tuple(t.placements) if is_distributed(t) else "whole" for t in (value, param))
    if placements != expected:
        raise ValueError(
            f"with placements {placements}, the parameter has {expected}: save and load with "
            "torch.distributed.checkpoint, which cuts it anew"
        )
    return value


def _saved_names(saved: Sequence[Group]) -> Iterator[tuple[str, Hashable]]:
    for index, group in enumerate(saved):
        for name, id_ in zip(names_of(group, f"saved group {index}"), group["params"], strict=True):
            yield (id_ if isinstance(id_, str) else name), id_


def _why(source: Source | None) -> str:
    return "it is not in the loaded state" if source is None else "what was saved is of another algorithm"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
