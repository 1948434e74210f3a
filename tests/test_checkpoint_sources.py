"""What a state may come from: other optimizers, groups in another order, groups that were not there; and what not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import checkpoint_cases as cases
import muonshard
import same_bits
from pool import Pool

SHAPES = ((6, 4), (5, 5), (4,), (3,))
NAMES = ("in", "out", "bias", "scale")
Pairs = list[tuple[str, nn.Parameter]]


def pairs() -> Pairs:
    return list(zip(NAMES, map(nn.Parameter, same_bits.draw(SHAPES, seed=0)), strict=True))


def train(params: Pairs, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        for (_, param), grad in zip(params, same_bits.draw(SHAPES, seed=step + 1), strict=True):
            param.grad = grad
        for optimizer in optimizers:
            optimizer.step()


def without_names(params: Pairs) -> list[Any]:
    return [param for _, param in params]


def muon_groups(params: Pairs, given: Callable[[Pairs], list[Any]] = list) -> list[dict[str, Any]]:
    """A group for Muon and one for AdamW; parameters are given with their names, or without."""
    return [
        {"params": given(params[:2]), "lr": 0.05},
        {"params": given(params[2:]), "algorithm": "adamw", "lr": 0.01},
    ]


def unbroken(steps: int) -> list[Tensor]:
    params = pairs()
    train(params, [muonshard.Muon(muon_groups(params))], range(steps))
    return [param.detach() for _, param in params]


def same(params: Pairs, expected: list[Tensor]) -> bool:
    return all(torch.equal(param, value) for (_, param), value in zip(params, expected, strict=True))


def load_silently(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("given", [list, without_names])
def test_torchs_muon_and_adamw_load_one_after_the_other(given: Callable[[Pairs], list[Any]]) -> None:
    params = pairs()
    muon, adamw = torch.optim.Muon(given(params[:2]), lr=0.05), torch.optim.AdamW(given(params[2:]), lr=0.01)
    train(params, [muon, adamw], range(4))
    ours = muonshard.Muon(muon_groups(params, given), lr=0.3)
    with pytest.warns(UserWarning, match=r"^group 1 \((bias|parameter 0 of group 1), .*\) starts fresh: it is not in"):
        ours.load_state_dict(muon.state_dict())
    load_silently(ours, adamw.state_dict())
    train(params, [ours], range(4, 8))
    assert same(params, unbroken(8))


def test_options_that_torchs_muon_lacks_stay_as_the_group_has_them() -> None:
    params = pairs()[:2]
    theirs = torch.optim.Muon(params, lr=0.5)
    ours = muonshard.Muon([{"params": params[:1], "num_heads": 2}, {"params": params[1:]}])
    load_silently(ours, theirs.state_dict())
    assert [group["num_heads"] for group in ours.param_groups] == [2, None]
    assert [group["lr"] for group in ours.param_groups] == [0.5, 0.5]


def test_matrices_that_adamw_had_start_fresh() -> None:
    params = pairs()
    adamw = torch.optim.AdamW(params, lr=0.01)
    train(params, [adamw], range(3))
    ours = muonshard.Muon(muon_groups(params))
    with pytest.warns(UserWarning, match=r"^group 0 \(in, out\) starts fresh: what was saved is of another algorithm$"):
        ours.load_state_dict(adamw.state_dict())
    assert ours.param_groups[0]["lr"] == 0.05
    (_, matrix), (_, vector) = params[0], params[2]
    assert not ours.state[matrix]
    assert torch.equal(ours.state[vector]["exp_avg"], adamw.state[vector]["exp_avg"])


def test_groups_that_changed_order_are_found_by_name() -> None:
    params = pairs()
    first = muonshard.Muon(muon_groups(params))
    train(params, [first], range(4))
    reordered = [params[i] for i in (3, 2, 1, 0)]
    groups = [
        {"params": reordered[:2], "algorithm": "adamw"},
        {"params": reordered[2:3]},
        {"params": reordered[3:], "num_heads": 1},
    ]
    second = muonshard.Muon(groups)
    load_silently(second, copy.deepcopy(first.state_dict()))
    assert [group["lr"] for group in second.param_groups] == [0.01, 0.05, 0.05]
    assert [group["param_names"] for group in second.param_groups] == [["scale", "bias"], ["out"], ["in"]]
    train(params, [second], range(4, 8))
    assert same(params, unbroken(8))


def test_a_group_that_was_not_there_starts_fresh_and_saved_leftovers_are_told() -> None:
    params = pairs()
    first = muonshard.Muon([{"params": params[:1]}, {"params": params[2:3], "algorithm": "adamw"}])
    train(params, [first], range(2))
    second = muonshard.Muon([{"params": params[:1]}, {"params": params[1:2], "lr": 0.7}])
    with pytest.warns(
        UserWarning, match=r"^group 1 \(out\) starts fresh.*; no parameter takes the saved state of bias$"
    ):
        second.load_state_dict(first.state_dict())
    assert second.param_groups[1]["lr"] == 0.7
    assert torch.equal(second.state[params[0][1]]["momentum_buffer"], first.state[params[0][1]]["momentum_buffer"])


def test_a_frozen_parameter_needs_no_state_and_adamw_may_have_had_no_gradient() -> None:
    params = pairs()
    params[1][1].requires_grad_(False)
    first = muonshard.Muon(muon_groups(params))
    for _, param in params[:1] + params[2:3]:
        param.grad = torch.ones_like(param)
    first.step()
    state = first.state_dict()
    del state["state"][1]
    second = muonshard.Muon(muon_groups(params))
    with pytest.warns(UserWarning, match="^scale of group 1 start fresh: no state was saved for them$"):
        second.load_state_dict(state)
    before = params[1][1].clone()
    params[3][1].grad = torch.ones(3)
    second.step()
    assert torch.equal(params[1][1], before)


def test_the_state_of_a_run_that_has_not_stepped_is_empty_and_loads() -> None:
    params = pairs()
    load_silently(muonshard.Muon(muon_groups(params)), muonshard.Muon(muon_groups(params)).state_dict())


def drop_momentum(state: dict[str, Any]) -> None:
    del state["state"][1]["momentum_buffer"]
    state["state"][1]["other"] = 1


def drop_entry(state: dict[str, Any]) -> None:
    del state["state"][0]


def drop_second_moment(state: dict[str, Any]) -> None:
    del state["state"][2]["exp_avg_sq"]


def reshape_momentum(state: dict[str, Any]) -> None:
    state["state"][0]["momentum_buffer"] = torch.zeros(4, 6)


def reshape_moment(state: dict[str, Any]) -> None:
    state["state"][3]["exp_avg"] = torch.zeros(4)


def rename(state: dict[str, Any]) -> None:
    state["param_groups"][0]["param_names"][1] = "elsewhere"


def regroup(state: dict[str, Any]) -> None:
    group = state["param_groups"][0]
    other = {**group, "params": group["params"][1:], "param_names": group["param_names"][1:], "momentum": 0.5}
    group |= {"params": group["params"][:1], "param_names": group["param_names"][:1]}
    state["param_groups"].append(other)


def forget_names_and_a_parameter(state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        del group["param_names"]
    state["param_groups"][0]["params"].pop()


def make_it_anothers(state: dict[str, Any]) -> None:
    state["param_groups"][0] = {"params": [0, 1], "lr": 0.1, "dampening": 0}
    del state["param_groups"][1]["param_names"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_momentum, "^the state cannot be loaded: out has no saved momentum_buffer$"),
        (drop_entry, "in has no saved state, others of its group have"),
        (drop_second_moment, "bias has no saved exp_avg_sq"),
        (reshape_momentum, r"in has a saved momentum_buffer of shape \(4, 6\), the parameter has \(6, 4\)"),
        (reshape_moment, r"scale has a saved exp_avg of shape \(4,\), the parameter has \(3,\)"),
        (rename, "out has no saved state"),
        (regroup, r"group 0 has parameters of saved groups \[0, 2\], whose momentum differ \(0.95, 0.5\)"),
        (forget_names_and_a_parameter, r"it has muon groups of \[1\] parameters, the optimizer of \[2\]. Give both"),
        (make_it_anothers, "neither Muon's nor AdamW's: its options are dampening, lr, params"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_it_and_changes_nothing(
    damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    params = pairs()
    first = muonshard.Muon(muon_groups(params))
    train(params, [first], range(3))
    state = copy.deepcopy(first.state_dict())
    damage(state)
    second = muonshard.Muon(muon_groups(params))
    train(params, [second], range(1))
    before = copy.deepcopy(second.state_dict())
    with pytest.raises(ValueError, match=message):
        second.load_state_dict(state)
    after = second.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


def test_a_sharded_state_is_not_taken_for_a_whole_one(pool: Pool) -> None:
    errors = pool.failures(2, load_shards_as_if_whole)
    for error in errors:
        assert error is not None
        assert (
            "matrices.0 has a saved momentum_buffer with placements (Shard(dim=0),), the parameter has whole" in error
        )


def load_shards_as_if_whole() -> None:
    model, optimizer = cases.make_run(cases.fsdp)
    cases.train(model, optimizer, range(1))
    _, other = cases.make_run(cases.data_parallel)
    other.load_state_dict(optimizer.state_dict())


def test_hooks_run_around_a_load() -> None:
    params = pairs()
    first = muonshard.Muon(muon_groups(params))
    train(params, [first], range(2))
    second = muonshard.Muon(muon_groups(params))
    seen: list[Any] = []

    def before(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append(len(optimizer.state))
        return {**state, "param_groups": [{**group, "lr": 0.125} for group in state["param_groups"]]}

    second.register_load_state_dict_pre_hook(before)
    second.register_load_state_dict_post_hook(lambda optimizer: seen.append(len(optimizer.state)))
    load_silently(second, first.state_dict())
    assert seen == [0, 4]
    assert [group["lr"] for group in second.param_groups] == [0.125, 0.125]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, param in pairs():
            self.register_parameter(name, param)


def test_a_checkpoint_of_torchs_muon_loads_in_place_of_ours(tmp_path: Path) -> None:
    """torch.distributed.checkpoint must be told that the options which only ours has are not there."""
    model = Net()
    matrices = [(name, param) for name, param in model.named_parameters() if param.dim() == 2]
    theirs = torch.optim.Muon(matrices, lr=0.05)
    params = list(model.named_parameters())
    train(params, [theirs], range(3))
    dcp.save(get_optimizer_state_dict(model, theirs), checkpoint_id=tmp_path)
    ours = muonshard.Muon(matrices, lr=0.3)
    ours.zero_grad()  # else torch takes it that a run is on its way, and makes no state to load into
    state = get_optimizer_state_dict(model, ours)
    dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(model, ours, state)
    assert ours.param_groups[0]["lr"] == 0.05
    for _, param in matrices:
        assert torch.equal(ours.state[param]["momentum_buffer"], theirs.state[param]["momentum_buffer"])
