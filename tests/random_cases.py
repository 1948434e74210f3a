"""Hypothesis strategies for `layout_cases.Case`: meshes, placements, shapes, splits, missing gradients, options."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

from layout_cases import STEPS, WORLD, Case, Mesh, Param

MESH_SHAPES: tuple[tuple[int, ...], ...] = (
    *((1,), (2,), (3,), (5,), (8,)),
    *((2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 3)),
    *((2, 2, 2), (2, 1, 3), (3, 2, 1)),
)
"""Process groups stay open between draws, so there are not more kinds than these."""

SIZES = st.one_of(st.integers(1, 9), st.sampled_from((12, 16, 17, 24, 33)))
VALUES = st.sampled_from((math.inf, -math.inf, math.nan))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """A mesh of some ranks of the world: the first ones, or the last ones in falling order."""
    shape = draw(st.sampled_from(MESH_SHAPES))
    size = math.prod(shape)
    ranks = tuple(range(size))
    backwards = draw(st.sampled_from((False, False, True)))
    return Mesh(shape, tuple(WORLD - 1 - rank for rank in ranks) if backwards else ranks)


@st.composite
def blocks(draw: st.DrawFn, size: int, flat: bool) -> dict[str, Any]:
    """How a dim of `size` is split into blocks and heads."""
    edges = sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=3)) - {size})
    splits = [stop - start for start, stop in zip([0, *edges], [*edges, size], strict=True)]
    heads = [draw(st.sampled_from([count for count in range(1, 5) if block % count == 0])) for block in splits]
    rule: dict[str, Any] = {}
    if len(splits) > 1:
        rule["splits"] = splits
    if any(count > 1 for count in heads):
        rule["num_heads"] = heads if len(splits) > 1 else heads[0]
    return rule if not flat else {"flatten": True, **rule}


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A shape and how it is read: a matrix, a stack of experts, a convolution; the latter two of any of their ranks."""
    kind = draw(st.sampled_from(("matrix", "matrix", "experts", "convolution")))
    if kind == "matrix":
        shape: tuple[int, ...] = draw(st.tuples(SIZES, SIZES))
    elif kind == "experts":
        shape = draw(st.tuples(st.integers(1, 5), SIZES, SIZES))
    else:
        kernel = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
        shape = (draw(SIZES), draw(st.integers(1, 5)), *kernel)
    flat = kind == "convolution"
    split_dim = 0 if flat else draw(st.integers(0, 1))
    rule = draw(blocks(shape[split_dim + (kind == "experts")], flat)) if draw(st.booleans()) else {}
    if flat:
        rule["flatten"] = True
    if split_dim:
        rule["split_dim"] = 1
    if draw(st.booleans()):
        rule["transposed"] = True
    return shape, rule


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.sampled_from((0.02, 0.3)),
        "weight_decay": st.just(0.0),
        "momentum": st.sampled_from((0.0, 0.9)),
        "nesterov": st.just(False),
        "ns_steps": st.sampled_from((1, 3)),
        "adjust_lr_fn": st.just("match_rms_adamw"),
    },
)
"""Of a parameter's group; what is not given is by default."""


Where = tuple[int | None, tuple[int | None, ...], bool]
"""A parameter's mesh, cuts and their order."""


@st.composite
def residences(draw: st.DrawFn, places: tuple[Mesh, ...], ndim: int) -> Where:
    """Where a parameter may live: on one of these meshes, or as a plain tensor on every rank of the world."""
    index = draw(st.sampled_from((*range(len(places)), *range(len(places)), None)))
    if index is None:
        return None, (), False
    axes, dims = len(places[index].shape), list(range(ndim))
    as_hsdp = st.tuples(*[st.none()] * (axes - 1), st.sampled_from(dims))
    anyhow = st.tuples(*[st.sampled_from([*dims, None])] * axes)
    return index, draw(st.one_of(anyhow, as_hsdp)), draw(st.booleans())


@st.composite
def parameters(draw: st.DrawFn, places: tuple[Mesh, ...], others: list[Param]) -> Param:
    """A parameter; it may live where one of the others does."""
    shape, rule = draw(tensors())
    alike = [(p.mesh, p.cuts, p.inner_first) for p in others if len(p.shape) == len(shape)]
    shared = st.sampled_from(alike) if alike else st.nothing()
    index, cuts, inner_first = draw(st.one_of(shared, residences(places, len(shape))))
    mesh_shape = () if index is None else places[index].shape
    shards = math.prod(size for size, cut in zip(mesh_shape, cuts, strict=True) if cut is not None)
    none, every = frozenset[int](), frozenset(range(shards))
    some = st.one_of(st.sampled_from((none, every)), st.frozensets(st.integers(0, shards - 1)))
    absent = draw(st.one_of(st.just((none,) * STEPS), st.tuples(*[some] * STEPS)))
    spoilt = st.tuples(st.integers(0, STEPS - 1), st.integers(0, 999), VALUES)
    poison = draw(st.one_of(st.just([]), st.lists(spoilt, max_size=2)))
    return Param(
        shape=shape,
        mesh=index,
        cuts=cuts,
        inner_first=inner_first,
        dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16))),
        options=rule | draw(OPTIONS),
        absent=absent,
        poison=tuple(poison),
    )


RUN_OPTIONS = st.fixed_dictionaries(
    {
        "bucket_bytes": st.sampled_from((64 << 20, 1 << 12, 1 << 9, 1)),
        "exchange_dtype": st.sampled_from((torch.bfloat16, torch.bfloat16, torch.float32, torch.float16)),
        "exchange": st.sampled_from(("allgather", "owner", "auto")),
        "orthogonalize": st.sampled_from(("newton_schulz", "newton_schulz", "unit_rows", "polar")),
        "nonfinite": st.sampled_from(("propagate", "skip", "raise")),
    }
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A few parameters on one mesh or two."""
    places = tuple(draw(st.lists(meshes(), min_size=1, max_size=2)))
    params: list[Param] = []
    for _ in range(draw(st.integers(1, 6))):
        params.append(draw(parameters(places, params)))
    return Case(places, tuple(params), draw(RUN_OPTIONS), draw(st.integers(0, 99)))
