"""`param_groups`: the parameter groups of a whole model."""

from __future__ import annotations

import difflib
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypedDict, Unpack

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from muonshard.routing.decisions import Decision, ParamGroups
from muonshard.routing.outputs import output_weights
from muonshard.routing.places import Place, is_convolution, places, sites
from muonshard.routing.rules import ModelFacts, Verdict, judge
from muonshard.routing.selection import Selection, Selector
from muonshard.routing.splits import Known, known_options

KNOWN: tuple[Known, ...] = ("fused", "heads", "transposed")


class GroupOptions(TypedDict, total=False):
    """Options of the groups: of Muon's as they are, of AdamW's with the prefix `adamw_`."""

    lr: float | Tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    adamw_lr: float | Tensor
    adamw_betas: tuple[float, float]
    adamw_eps: float
    adamw_weight_decay: float


def param_groups(
    model: nn.Module,
    *,
    exclude: Selector | Iterable[Selector] = (),
    include: Selector | Iterable[Selector] = (),
    convolutions: bool = False,
    split_known: bool | Collection[Known] = False,
    **options: Unpack[GroupOptions],
) -> ParamGroups:
    """Parameter groups for `muonshard.Muon`: hidden matrices to Muon, everything else to AdamW.

    Muon takes the weights of linear layers, stacks of experts and other matrices, and convolutions if asked. AdamW
    takes embeddings, the output layer (tied or not), norms, biases, all that has fewer than two dims or is a vector in
    the shape of a matrix, routers of experts, depthwise and transposed convolutions, and what `exclude` names. Frozen
    parameters are in no group, a tied weight is in one. `print` the result to see every decision with its reason.

    Only names, shapes and module types are read, so parameters may be DTensors or on the meta device. Parallelise the
    model first: `fully_shard` and `parallelize_module` make new parameters.

    Args:
        model: the model, wrapped or not. A `ModuleList` of models, such as pipeline stages, is read as several models.
        exclude: goes to AdamW, whatever it is: a glob on the parameter's name, a function of name and parameter, or
            several of these. Names are those of `named_parameters`, and match with or without the parts that wrappers
            add (DistributedDataParallel, torch.compile, activation checkpointing); functions get them without.
        include: goes to Muon, whatever it is, in the same form; where both match, `exclude` wins. A convolution is
            flattened, as is anything else of four or more dims.
        convolutions: whether convolutions go to Muon, as (out, in * kernel), each of their groups a matrix. Muon's
            author leaves the first one of a ConvNet to AdamW: name it in `exclude`.
        split_known: which parts of known modules become matrices of their own: "fused" (Q, K and V of a fused
            projection, gate and up, gates of recurrent layers, experts one below the other), "heads" (of attention
            projections), and "transposed" (weights stored (in, out) get the learning rate of (out, in)). True for all.
        **options: options for all groups of Muon (`lr`, `momentum`, ...) or, with the prefix `adamw_`, of AdamW. Those
            not given are filled in by the optimizer.

    Returns:
        A list of dicts with "params" as (name, parameter) pairs, "algorithm", and the options of the group.

    Raises:
        TypeError: `model` is no module, or an option is unknown.
        ValueError: a glob matches no parameter, `include` names a parameter that holds no matrix, nothing is trainable,
            or a parameter is not initialised yet.

    Warns:
        UserWarning: no parameter goes to Muon. It is no error, since a pipeline stage may have none.
    """
    _check(model, options)
    found = sites(model)
    held = places(found)
    named = dict(model.named_parameters())
    aliases = {name: held[id(parameter)] for name, parameter in named.items()}
    wanted = Selection("include", include, named, aliases)
    unwanted = Selection("exclude", exclude, named, aliases)
    facts = ModelFacts(output_weights(found), convolutions)
    kinds = KNOWN if split_known is True else tuple(split_known or ())
    if unknown := set(kinds) - set(KNOWN):
        raise ValueError(f"split_known={split_known!r}: {sorted(unknown)} is not among {KNOWN}")
    decisions = tuple(
        _decide(name, parameter, aliases[name], facts, kinds, wanted.why(name), unwanted.why(name))
        for name, parameter in named.items()
    )
    _check_decisions(decisions)
    return ParamGroups(_group(decisions, named, dict(options)), decisions)


def _decide(
    name: str,
    parameter: nn.Parameter,
    where: list[Place],
    facts: ModelFacts,
    kinds: Collection[Known],
    wanted: str | None,
    unwanted: str | None,
) -> Decision:
    """The decision on one parameter, which `where` lists all places of."""
    shape = tuple(parameter.shape)
    if not parameter.requires_grad:
        return Decision(name, shape, "none", "frozen (requires_grad=False)")
    verdicts = [judge(parameter, place, facts) for place in where]
    verdict = next((verdict for verdict in verdicts if verdict.algorithm == "adamw"), verdicts[0])
    if unwanted is not None:
        verdict = Verdict("adamw", unwanted)
    elif wanted is not None:
        if len(shape) < 2 or parameter.is_complex():
            raise ValueError(
                f"{wanted}: {name} has shape {shape} and dtype {parameter.dtype}, but Muon takes real parameters of "
                "two or more dims; leave it to AdamW"
            )
        verdict = Verdict("muon", wanted)
    others = [place.name for place in where[1:]]
    tied = f", tied with {others[0]}" + (f" and {len(others) - 1} more" if others[1:] else "") if others else ""
    options = _matrix_options(parameter, where[0], kinds) if verdict.algorithm == "muon" else {}
    return Decision(name, shape, verdict.algorithm, verdict.reason + tied, options)


def _matrix_options(parameter: nn.Parameter, place: Place, kinds: Collection[Known]) -> dict[str, Any]:
    """How the optimizer reads the matrices in a parameter of Muon's."""
    if is_convolution(place.module) or parameter.ndim > 3:
        groups = getattr(place.module, "groups", 1)
        return {"flatten": True, "num_heads": groups} if groups > 1 else {"flatten": True}
    return known_options(parameter, place, kinds)


def _group(
    decisions: Iterable[Decision], named: Mapping[str, nn.Parameter], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Groups of equal algorithm and options, Muon's first."""
    given = {
        "muon": {key: value for key, value in options.items() if not key.startswith("adamw_")},
        "adamw": {key.removeprefix("adamw_"): value for key, value in options.items() if key.startswith("adamw_")},
    }
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for decision in sorted(decisions, key=lambda decision: decision.algorithm != "muon"):
        if decision.algorithm != "none":
            key = (decision.algorithm, *sorted(decision.options.items()))
            new = {"params": [], "algorithm": decision.algorithm, **given[decision.algorithm], **decision.options}
            groups.setdefault(key, new)["params"].append((decision.name, named[decision.name]))
    return list(groups.values())


def _check(model: nn.Module, options: Mapping[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for key in options.keys() - GroupOptions.__annotations__.keys():
        close = difflib.get_close_matches(key, GroupOptions.__annotations__, n=1)
        hint = f": did you mean {close[0]}?" if close else f"; options are {', '.join(GroupOptions.__annotations__)}"
        raise TypeError(f"param_groups has no option {key!r}{hint}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"{name} is not initialised: run the model once (it has lazy modules) before param_groups")


def _check_decisions(decisions: tuple[Decision, ...]) -> None:
    if all(decision.algorithm == "none" for decision in decisions):
        found = "every parameter is frozen" if decisions else "it has no parameters"
        raise ValueError(f"the model has nothing to optimise: {found}")
    if not any(decision.algorithm == "muon" for decision in decisions):
        counts = Counter(decision.reason for decision in decisions)
        why = ", ".join(f"{count} x {reason}" for reason, count in counts.items())
        warnings.warn(f"no parameter goes to Muon: {why}. include= gives it more", UserWarning, stacklevel=3)
