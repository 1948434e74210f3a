"""What a parameter is, and so where it goes.

Each rule is one function that knows one kind of parameter; RULES tries them in order, and the first that knows the
parameter decides. Types come before names. The policy is that of Muon's author (https://kellerjordan.github.io/posts/muon/):
hidden matrices to Muon; the input and output layers, gains and biases to AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from muonshard.routing.places import (
    Place,
    class_name,
    class_names,
    is_convolution,
    is_linear,
    listed,
    stores_in_out,
    words,
)

Algorithm = Literal["muon", "adamw", "none"]

EMBEDDING_ENDINGS = frozenset({"embed", "embeds", "embedding", "embeddings", "embedder", "emb"})
LOOKUP_WORDS = EMBEDDING_ENDINGS | listed(
    "wte wpe pos position positions positional cls token tokens tok vocab codebook codebooks latents queries prompt "
    "prompts registers prototypes"
)
ELEMENTWISE_NAMES = frozenset({"D"})  # the skip of state-space layers
ELEMENTWISE_WORDS = listed("scale scales gain gains gamma beta log decay temperature mask slopes alibi norm")
GATE_NAMES = listed("gate gating gate_network gating_network wg w_gate")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where a parameter goes, and why."""

    algorithm: Algorithm
    reason: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rules must know beyond the place.

    Attributes:
        output_weights: for ids of parameters of output layers, how they were recognised.
        convolutions: whether the caller gives convolutions to Muon.
    """

    output_weights: dict[int, str]
    convolutions: bool


Rule = Callable[[Tensor, Place, ModelFacts], Verdict | None]


def judge(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict:
    """What the first rule that knows the parameter says; the last rule knows every parameter."""
    return next(verdict for rule in RULES if (verdict := rule(parameter, place, facts)) is not None)


def expert_counts(place: Place) -> set[int]:
    """The numbers of experts that the place's module and the two above it speak of."""
    counts: set[int] = set()
    for module in (place.module, *place.parents[-2:]):
        counts |= {value for name in EXPERT_COUNTS if isinstance(value := getattr(module, name, None), int)}
        for name, child in module.named_children():
            if "experts" in words(name):
                counts |= {parameter.shape[0] for parameter in child.parameters(recurse=False) if parameter.ndim == 3}
                counts |= {len(child)} if isinstance(child, nn.ModuleList) else set()
    return counts


def _complex(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    return Verdict("adamw", "complex numbers") if parameter.is_complex() else None


def _bias(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    return Verdict("adamw", "bias") if {"bias", "biases"} & set(words(place.attribute)) else None


def _norm(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    for name in class_names(place.module):
        if words(name.removesuffix("d"))[-1:] == ("norm",):  # BatchNorm2d too
            return Verdict("adamw", f"norm ({name})")
    return None


def _too_few_dims(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    if parameter.ndim >= 2:
        return None
    return Verdict("adamw", "1 dimension" if parameter.ndim == 1 else "a scalar")


def _reparametrised(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    """weight_norm, spectral_norm and other parametrizations, by hooks (torch.nn.utils) or by ParametrizationList."""
    layer = is_linear(place.module) or is_convolution(place.module)
    computed = layer and place.attribute in {"weight_g", "weight_v", "weight_orig"}
    if computed or isinstance(place.module, ParametrizationList):
        return Verdict("adamw", "reparametrised: the matrix in use is computed from it")
    return None


def _embedding(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    for name in class_names(place.module):
        if name == "EmbeddingBag" or EMBEDDING_ENDINGS & set(words(name)[-1:]):
            return Verdict("adamw", f"embedding ({name})")
    return None


def _output(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    how = facts.output_weights.get(id(parameter))
    return None if how is None else Verdict("adamw", f"output layer ({how})")


def _router(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    """Routers of a mixture of experts.

    A row scores one expert as a row of the output layer scores one token, so they go where the output layer goes.
    Practice is divided: marin keeps routers on Adam, Megatron-LM has an option for it (--moe-router-skip-muon) but
    its default is Muon, and GLM-4.5 was trained so (arXiv 2508.06471, section 2.4).
    """
    own, *above = (words(name) for name in (class_name(place.module), *reversed(place.path)))
    if "router" in own or any("router" in names for names in above):
        return Verdict("adamw", "MoE router (by name)")
    called_gate = place.label in GATE_NAMES or own[-1:] == ("gate",) or place.path[-2:-1] == ("gate",)
    inside_expert = any({"expert", "experts"} & set(names) for names in above)
    if parameter.ndim == 2 and called_gate and not inside_expert:
        for experts in set(parameter.shape) & expert_counts(place):
            return Verdict("adamw", f"MoE router (scores {experts} experts)")
    return None


def _convolution(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    if isinstance(place.module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return Verdict("adamw", "transposed convolution: its first dim is the input")
    if not is_convolution(place.module):
        return None
    if parameter.shape[1] == 1 and (isinstance(place.module, nn.Conv1d) or place.module.groups != 1):
        return Verdict("adamw", "depthwise convolution: one vector per channel")
    if 1 in (parameter.shape[0], math.prod(parameter.shape[1:])):
        return Verdict("adamw", "one row or one column: a vector in the shape of a matrix")
    if any("patch" in words(part) for part in place.path):
        return Verdict("adamw", "patch embedding: the input layer")
    if not facts.convolutions:
        return Verdict("adamw", "convolution (convolutions=True gives it to Muon)")
    return Verdict("muon", "convolution, as (out, in * kernel)")


def _input_layer(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    """Linear layers that embed: called so themselves, or part of a patch embedding."""
    if not (is_linear(place.module) or stores_in_out(place.module)):
        return None
    if any("patch" in words(part) and LOOKUP_WORDS & set(words(part)) for part in place.path):
        return Verdict("adamw", "patch embedding: the input layer")
    if place.path and (EMBEDDING_ENDINGS | {"tokens"}) & set(words(place.path[-1])[-1:]):
        return Verdict("adamw", f"input layer (named {place.path[-1]})")
    return None


def _vector(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    if parameter.ndim > 3 or 1 not in parameter.shape[-2:]:
        return None
    return Verdict("adamw", "one row or one column: a vector in the shape of a matrix")


def _linear(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    layer = is_linear(place.module) or stores_in_out(place.module)
    if not layer or place.attribute != "weight" or parameter.ndim != 2:
        return None
    return Verdict("muon", f"linear weight ({class_name(place.module)})")


def _bilinear(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    return Verdict("adamw", "bilinear form, not a linear map") if isinstance(place.module, nn.Bilinear) else None


def _not_a_map(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict | None:
    """Other parameters whose name says that they are looked up, added or scaled with, not multiplied by as a matrix."""
    for word in words(place.label):
        if word in LOOKUP_WORDS:
            return Verdict("adamw", f"embedding (named {place.label})")
        if word in ELEMENTWISE_WORDS or place.label in ELEMENTWISE_NAMES:
            return Verdict("adamw", f"used element by element (named {place.label})")
    return None


def _other(parameter: Tensor, place: Place, facts: ModelFacts) -> Verdict:
    if parameter.ndim == 2:
        return Verdict("muon", f"matrix of {class_name(place.module)}")
    if parameter.ndim > 3:
        return Verdict("adamw", f"{parameter.ndim} dimensions: neither a matrix nor a stack of them")
    if parameter.shape[0] == 1:
        return Verdict("adamw", "3 dimensions, the first of size 1: not a stack")
    if place.in_attention and parameter.shape[0] > max(parameter.shape[1:]):
        return Verdict("adamw", "3 dimensions, the first the largest: (in, heads, size), not a stack")
    of_experts = place.in_expert or parameter.shape[0] in expert_counts(place)
    return Verdict("muon", f"stack of {parameter.shape[0]} {'experts' if of_experts else 'matrices'}")


RULES: tuple[Rule, ...] = (
    _complex,
    _bias,
    _norm,
    _too_few_dims,
    _reparametrised,
    _embedding,
    _output,
    _router,
    _convolution,
    _input_layer,
    _vector,
    _linear,
    _bilinear,
    _not_a_map,
    _other,
)
