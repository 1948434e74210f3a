"""Routing of models that are really wrapped or sharded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from muonshard.routing import Decision, param_groups
from pool import Pool
from routing_models import GPT, ConvNet, MoE, decided

Decisions = tuple[Decision, ...]


class Everything(nn.Module):
    """A language model, experts and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.moe, self.convs = GPT(vocabulary=51, dim=12, tied=True), MoE(), ConvNet()


def _decisions(model: nn.Module) -> Decisions:
    return param_groups(model, split_known=True, convolutions=True).decisions


def _fully_sharded() -> tuple[Decisions, bool]:
    model = Everything()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.gpt.blocks[0].attn.wo, *model.gpt.blocks, model.moe.gate, model.moe, model.convs.stem):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = param_groups(model, split_known=True, convolutions=True)
    are_dtensors = all(isinstance(parameter, DTensor) for group in groups for _, parameter in group["params"])
    return groups.decisions, are_dtensors


def _tensor_parallel() -> Decisions:
    model = Everything()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.gpt.blocks:
        plan = {"attn.wqkv": ColwiseParallel(), "attn.wo": RowwiseParallel(), "mlp.up": ColwiseParallel()}
        parallelize_module(block, mesh, plan)
    return _decisions(model)


def _data_parallel() -> list[str]:
    model = DistributedDataParallel(GPT())
    groups = param_groups(model, exclude="blocks.0.attn.wo.weight")
    assert decided(groups)["module.blocks.0.attn.wo.weight"].algorithm == "adamw"
    names = [name for group in groups for name, _ in group["params"]]
    assert set(names) == {name for name, _ in model.named_parameters()}
    return names


def test_fully_shard_changes_no_decision(pool: Pool) -> None:
    for decisions, are_dtensors in pool.run(2, _fully_sharded):
        assert are_dtensors
        assert decisions == _decisions(Everything())


def test_tensor_parallelism_changes_no_decision(pool: Pool) -> None:
    for decisions in pool.run(2, _tensor_parallel):
        assert decisions == _decisions(Everything())


def test_distributed_data_parallel_keeps_its_names_and_needs_none_in_globs(pool: Pool) -> None:
    first, second = pool.run(2, _data_parallel)
    assert first == second
    assert all(name.startswith("module.") for name in first)


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile])
def test_wrappers_of_torch_change_no_decision(wrap: object) -> None:
    assert callable(wrap)
    model = GPT()
    for index in range(2):
        model.blocks[index] = wrap(model.blocks[index])
    outside = wrap(model)
    for wrapped in (model, outside):
        groups = param_groups(wrapped, split_known=True, exclude="blocks.1.attn.wo.weight")
        bare = param_groups(GPT(), split_known=True, exclude="blocks.1.attn.wo.weight")
        assert [decision.name for decision in groups.decisions] == [name for name, _ in wrapped.named_parameters()]
        assert [(each.shape, each.algorithm, each.reason, each.options) for each in groups.decisions] == [
            (each.shape, each.algorithm, each.reason, each.options) for each in bare.decisions
        ]
