"""Real models, really parallelised: after each step the weights are those of one process with the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import muonshard
import real_models
import same_bits
from pool import Pool

STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 0.05, "adamw_lr": 0.01}

Make = Callable[[], nn.Module]
Batch = Callable[[int, int], Tensor]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank that holds some of it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(make: Make, batch: Batch, known: bool = False, **options: Any) -> tuple[list[str], int]:
    """Parameters that differ from one process's after some step, and how many matrices there are."""
    torch.manual_seed(0)
    model = make()
    groups = muonshard.param_groups(model, convolutions=True, split_known=known, **OPTIONS)
    alone = {name: nn.Parameter(whole(param)) for name, param in model.named_parameters()}
    same_groups = [{**group, "params": [(name, alone[name]) for name, _ in group["params"]]} for group in groups]
    plain = isinstance(model, DistributedDataParallel)
    optimizer = muonshard.Muon(groups, **options, process_group=dist.group.WORLD if plain else None)
    reference = muonshard.Muon(same_groups, **options)
    exact = {name for group in groups if group["algorithm"] == "muon" for name, _ in group["params"]}
    differing: set[str] = set()
    for step in range(STEPS):
        model(batch(step, dist.get_rank())).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            alone[name].grad = whole(param.grad)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            found, expected = whole(param), alone[name].detach()
            same = torch.equal(found, expected) if name in exact else torch.allclose(found, expected, atol=1e-6)
            differing |= set() if same else {name}
    return sorted(differing), sum(len(domain.jobs) for domain in optimizer.plan.domains)


LLAMAS = [
    (real_models.llama_under_fsdp_and_tensor_parallel, 4, real_models.tokens_of_pair),
    (real_models.llama_under_hsdp_and_tensor_parallel, 8, real_models.tokens_of_pair),
    (real_models.llama_under_tensor_parallel_alone, 2, real_models.tokens_of_pair),
    (real_models.llama_cut_by_columns_and_rows, 3, real_models.tokens),
    (real_models.llama_kept_whole_after_forward, 4, real_models.tokens),
    (real_models.llama_in_mixed_precision, 4, real_models.tokens),
    (real_models.llama_offloaded_to_the_cpu, 2, real_models.tokens),
    (real_models.llama_under_ddp, 2, real_models.tokens),
]


@pytest.mark.parametrize(("make", "world", "batch"), LLAMAS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_language_model_trains_as_in_one_process(pool: Pool, make: Make, world: int, batch: Batch) -> None:
    assert pool.run(world, train, make, batch) == [([], 14)] * world


def test_experts_and_dense_layers_on_two_meshes_train_as_in_one_process(pool: Pool) -> None:
    make, batch = real_models.moe_under_expert_parallel_and_fsdp, real_models.tokens
    assert pool.run(4, train, make, batch) == [([], 3 + 2 * 4)] * 4


def test_a_convnet_trains_as_in_one_process(pool: Pool) -> None:
    matrices = 1 + 3 + 1 + 1  # stem, three groups, pointwise, temporal; the rest is AdamW's
    assert pool.run(4, train, real_models.convnet_under_fsdp, real_models.images) == [([], matrices)] * 4


def test_pipeline_stages_train_as_in_one_process(pool: Pool) -> None:
    assert pool.run(4, train, real_models.pipeline_stages, real_models.activations) == [([], 2)] * 4


def gpt2() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=real_models.VOCABULARY, n_positions=16, n_embd=20, n_layer=2, n_head=2)
    config._attn_implementation = "eager"
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    for block in model.transformer.h:
        fully_shard(block, mesh=init_device_mesh("cpu", (3,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
    return Loss(model)


class Loss(nn.Module):
    """A language model of transformers that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


def test_gpt2_of_transformers_trains_as_in_one_process(pool: Pool) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    heads = 2 * (3 * 2 + 2 + 1 + 1)  # two layers: q, k and v by head, the output by head, two of the MLP
    assert pool.run(3, train, gpt2, real_models.tokens, True) == [([], heads)] * 3


def on_some_meshes_only() -> tuple[list[int], int]:
    """Three parameters, on ranks 0 and 1, on 1 to 3, and on 3 alone: what differs, and how many this rank has."""
    meshes = [DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [1, 2, 3], [3])]
    shapes = ((6, 5), (7, 4), (5, 5))
    values = same_bits.draw(shapes, seed=0)
    params = [
        nn.Parameter(distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None))
        for value, mesh in zip(values, meshes, strict=True)
    ]
    optimizer = muonshard.Muon(params, lr=0.1)
    same_bits.train(params, shapes, 2, optimizer)
    expected = same_bits.reference(shapes, 2, lr=0.1)
    here = [i for i, mesh in enumerate(meshes) if mesh.get_coordinate() is not None]
    return same_bits.differing([params[i] for i in here], [expected[i] for i in here]), len(optimizer.plan.tenants)


def test_a_rank_leaves_parameters_alone_whose_mesh_it_is_not_on(pool: Pool) -> None:
    assert pool.run(4, on_some_meshes_only) == [([], 1), ([], 2), ([], 1), ([], 2)]
