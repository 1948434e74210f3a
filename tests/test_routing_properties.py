"""What holds of the routing of any model: models are put together at random from known parts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from muonshard.matrices import MatrixRule, find_matrices
from muonshard.routing import ParamGroups, param_groups
from routing_models import GPT, ConvNet, Holder, MoE, SelfAttention, SwiGLU, Wrapper, grouped_names


def _tied_pair() -> nn.Module:
    pair = nn.ModuleDict({"embedding": nn.Embedding(11, 6), "decode": nn.Linear(6, 11, bias=False)})
    pair["decode"].weight = pair["embedding"].weight
    return pair


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 4),
    "vector": lambda: nn.Linear(6, 1),
    "embedding": lambda: nn.Embedding(11, 6),
    "tied": _tied_pair,
    "norm": lambda: nn.LayerNorm((3, 4)),
    "conv": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "up": lambda: nn.ConvTranspose1d(4, 6, 3),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=10),
    "fused": lambda: nn.MultiheadAttention(8, 2),
    "self_attention": lambda: SelfAttention(8, 4, 1),
    "moe": MoE,
    "mlp": lambda: SwiGLU(6, 8),
    "lstm": lambda: nn.LSTM(5, 3, proj_size=2),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "lookup": lambda: Holder(cls_token=(1, 1, 6), pos=(7, 6), scale=(3, 4), D=(3, 4)),
    "odd": lambda: Holder(five=(2, 2, 2, 2, 2), stack=(3, 2, 4), matrix=(5, 4), scalar=()),
    "empty": lambda: Holder(nothing=(0, 4)),
}


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """A model of some of PARTS, some frozen, some shared, some wrapped."""
    names = draw(st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=5))
    blocks = [nn.ModuleDict({name: PARTS[name]()}) for name in names]
    if draw(st.booleans()):
        blocks.append(blocks[0])
    wrappers = ("module", "_orig_mod", "_checkpoint_wrapped_module")
    model: nn.Module = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})
    for parameter in model.parameters():
        parameter.requires_grad_(draw(st.integers(0, 4)) > 0)
    for attribute in draw(st.lists(st.sampled_from(wrappers), max_size=2)):
        model = Wrapper(attribute, model)
    return model


def routed(model: nn.Module, convolutions: bool, split_known: bool) -> ParamGroups:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a drawn model may hold nothing for Muon
        return param_groups(model, convolutions=convolutions, split_known=split_known, lr=0.02, adamw_lr=1e-3)


@given(models(), st.booleans(), st.booleans())
def test_every_trainable_parameter_is_in_exactly_one_group_under_its_torch_name(
    model: nn.Module, convolutions: bool, split_known: bool
) -> None:
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        with pytest.raises(ValueError, match="nothing to optimise"):
            routed(model, convolutions, split_known)
        return
    groups = routed(model, convolutions, split_known)
    assert sorted(grouped_names(groups)) == sorted(trainable)
    assert all(parameter is trainable[name] for group in groups for name, parameter in group["params"])
    assert [decision.name for decision in groups.decisions] == [name for name, _ in model.named_parameters()]
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    assert len(options) == len({repr(sorted(each.items())) for each in options}), "equal options share a group"
    optimizer = torch.optim.SGD(groups)
    assert sorted(name for group in optimizer.param_groups for name in group["param_names"]) == sorted(trainable)


@given(models(), st.booleans(), st.booleans())
def test_what_goes_to_muon_can_be_read_as_matrices_that_cover_the_parameter(
    model: nn.Module, convolutions: bool, split_known: bool
) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    for decision in routed(model, convolutions, split_known).decisions:
        assert decision.reason
        if decision.algorithm == "muon":
            matrices = find_matrices(decision.shape, MatrixRule(**decision.options))
            assert sum(matrix.numel for matrix in matrices) == math.prod(decision.shape)
        else:
            assert not decision.options


@given(models())
def test_wrappers_change_no_decision(model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    bare = [(decision.shape, decision.algorithm, decision.options) for decision in routed(model, True, True).decisions]
    wrapped = Wrapper("module", Wrapper("_orig_mod", model))
    after = [
        (decision.shape, decision.algorithm, decision.options) for decision in routed(wrapped, True, True).decisions
    ]
    assert after == bare


@pytest.mark.parametrize("make", [GPT, MoE, ConvNet])
def test_the_meta_device_changes_no_decision(make: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        on_meta = make()
    assert routed(on_meta, True, True).decisions == routed(make(), True, True).decisions
