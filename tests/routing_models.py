"""Small models for the tests of routing, written as people write them, and ways to read what was decided on them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from muonshard.routing import Decision, ParamGroups


class SelfAttention(nn.Module):
    """Grouped-query attention with a fused projection."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wqkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)


class SwiGLU(nn.Module):
    """A gated MLP whose gate is called like a router's."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = SelfAttention(dim, heads=4, kv_heads=2)
        self.mlp = SwiGLU(dim, 3 * dim)


class GPT(nn.Module):
    """A language model of tokens and learned positions."""

    def __init__(self, vocabulary: int = 50, dim: int = 16, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, dim)
        self.pos_embed = nn.Parameter(torch.zeros(12, dim))
        self.blocks = nn.ModuleList([Block(dim) for _ in range(layers)])
        self.norm_f = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


class MoE(nn.Module):
    """Experts as 3-D parameters, a router in front of them."""

    def __init__(self, dim: int = 8, hidden: int = 12, experts: int = 4) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.zeros(experts, hidden, dim))
        self.w2 = nn.Parameter(torch.zeros(experts, dim, hidden))
        self.shared_expert_gate = nn.Linear(dim, 1, bias=False)


class ConvNet(nn.Module):
    """A ConvNet with every kind of convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.pointwise = nn.Conv2d(8, 16, 1)
        self.grouped = nn.Conv2d(16, 24, 3, groups=2)
        self.up = nn.ConvTranspose2d(24, 16, 2)
        self.short = nn.Conv1d(16, 16, 4, groups=16)
        self.features = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 12))
        self.fc = nn.Linear(12, 10)


class Wrapper(nn.Module):
    """What DistributedDataParallel, torch.compile or activation checkpointing put around a module."""

    def __init__(self, attribute: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(attribute, module)

    def forward(self, *args: Tensor) -> None:
        """Never called: the tests read the structure only."""


class Holder(nn.Module):
    """A module with one parameter of a given name and shape."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def decided(groups: ParamGroups) -> dict[str, Decision]:
    """The decisions by name."""
    return {decision.name: decision for decision in groups.decisions}


def goes_to(groups: ParamGroups, algorithm: str) -> set[str]:
    """The names of the parameters that an algorithm takes."""
    return {decision.name for decision in groups.decisions if decision.algorithm == algorithm}


def grouped_names(groups: ParamGroups) -> list[str]:
    """The names in the groups, in order."""
    return [name for group in groups for name, _ in group["params"]]
