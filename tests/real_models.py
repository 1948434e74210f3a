"""Small models, parallelised for real with torch's own tools, that return a loss."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, DIM, HIDDEN, HEADS, LENGTH = 37, 18, 27, 2, 8


def tokens(step: int, rank: int) -> Tensor:
    """A batch of this rank in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCABULARY, (2, LENGTH), generator=generator)


def tokens_of_pair(step: int, rank: int) -> Tensor:
    """A batch that two ranks of tensor parallel share."""
    return tokens(step, rank // 2)


class Attention(nn.Module):
    """Causal attention; works on however many heads the projections give it."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU, with a hidden size that two ranks cannot halve."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.mlp = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Columns, rows and sequence: each block cut over the ranks of a mesh axis."""
    for block in model.blocks:
        plan = {
            "norm1": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "norm2": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlp.gate": ColwiseParallel(use_local_output=False),
            "mlp.up": ColwiseParallel(use_local_output=False),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    whole = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, whole)


def shard_blocks(model: Llama, mesh: DeviceMesh, **options: object) -> None:
    """FSDP2, block by block."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh, **options)  # type: ignore[arg-type]


def llama_under_fsdp_and_tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Llama()
    tensor_parallel(model, mesh["tensor"])
    shard_blocks(model, mesh["data"])
    return model


def llama_under_hsdp_and_tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replica", "data", "tensor"))
    model = Llama()
    tensor_parallel(model, mesh["tensor"])
    shard_blocks(model, mesh["replica", "data"])
    return model


def llama_under_tensor_parallel_alone() -> nn.Module:
    model = Llama()
    tensor_parallel(model, init_device_mesh("cpu", (2,)))
    return model


def llama_cut_by_columns_and_rows() -> nn.Module:
    """Each parameter cut along the dim that divides."""
    model = Llama()
    mesh = init_device_mesh("cpu", (3,))
    shard_blocks(model, mesh, shard_placement_fn=lambda param: Shard(1) if param.ndim == 2 else None)
    return model


def llama_kept_whole_after_forward() -> nn.Module:
    model = Llama(tied=True)
    shard_blocks(
        model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data")), reshard_after_forward=False
    )
    return model


def llama_in_mixed_precision() -> nn.Module:
    model = Llama()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    shard_blocks(model, init_device_mesh("cpu", (4,)), mp_policy=policy)
    return model


def llama_offloaded_to_the_cpu() -> nn.Module:
    model = Llama()
    shard_blocks(model, init_device_mesh("cpu", (2,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return model


def llama_under_ddp() -> nn.Module:
    return DistributedDataParallel(Llama(tied=True))


class Experts(nn.Module):
    """A stack of experts; a token goes to the expert that its number names, if this rank has it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.w1 = nn.Parameter(torch.randn(count, 10, DIM) / 4)
        self.w2 = nn.Parameter(torch.randn(count, DIM, 10) / 3)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        first = dist.get_rank() % 2 * w1.shape[0] if w1.shape[0] < self.num_experts else 0
        out = torch.zeros_like(x)
        for expert in range(w1.shape[0]):
            chosen = (numbers % self.num_experts == first + expert).unsqueeze(-1)
            out = out + chosen * (torch.tanh(x @ w1[expert].T) @ w2[expert].T)
        return out


class MoE(nn.Module):
    """A language model with one layer of experts between dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.dense = FeedForward()
        self.experts = Experts(count=4)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        x = x + self.dense(x)
        x = x + self.experts(x, batch)
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def moe_under_expert_parallel_and_fsdp() -> nn.Module:
    """Experts cut by expert over one axis of a 2-D mesh and by FSDP over the other; dense weights on a mesh of all."""
    model = MoE()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    for name, param in list(model.experts.named_parameters()):
        cut = distribute_tensor(param.detach(), mesh["expert"], [Shard(0)], src_data_rank=None)
        model.experts.register_parameter(name, nn.Parameter(cut))
    fully_shard(model.experts, mesh=mesh["data"], shard_placement_fn=lambda _: Shard(1))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return model


class ConvNet(nn.Module):
    """Convolutions of one, two and three kinds of kernel; a depthwise one and a grouped one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 9, 3, padding=1), nn.Conv2d(9, 9, 3, padding=1, groups=9)
        self.grouped, self.pointwise = nn.Conv2d(9, 12, 3, groups=3), nn.Conv2d(12, 7, 1)
        self.temporal = nn.Conv1d(7, 5, 3)
        self.single = nn.Conv1d(1, 5, 4)
        self.fc = nn.Linear(5, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.gelu(self.depthwise(self.stem(images)))
        x = functional.gelu(self.pointwise(functional.gelu(self.grouped(x))))
        x = self.temporal(x.flatten(2)).mean(2) + self.single(images.flatten(1).unsqueeze(1)).mean(2)
        return self.fc(x).square().mean()


def convnet_under_fsdp() -> nn.Module:
    model = ConvNet()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return model


def images(step: int, rank: int) -> Tensor:
    """A batch of pictures."""
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(100 * step + rank))


class Stage(nn.Module):
    """A pipeline stage of its own size; the loss stands for what the other stages make of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, width, bias=False), nn.Linear(width, DIM, bias=False)
        self.norm = nn.RMSNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.tanh(self.up(x)))).square().mean() + x.mean()


def pipeline_stages() -> nn.Module:
    """Ranks 0 and 1 hold one stage, ranks 2 and 3 another."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    model = Stage(width=11 if mesh.get_local_rank("stage") == 0 else 20)
    fully_shard(model, mesh=mesh["data"])
    return model


def activations(step: int, rank: int) -> Tensor:
    """What enters a stage."""
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(100 * step + rank))
