"""Train a small GPT on the sources of Python's standard library, sharded over all processes with FSDP2.

    torchrun --nproc_per_node=4 examples/train_gpt.py                # with Muon, HSDP 2x2, on CPUs or GPUs
    torchrun --nproc_per_node=3 examples/train_gpt.py --optimizer adamw

The text is bytes, so there is no tokenizer; whole files are held out for validation. Any number of processes gets the
same batches: even numbers from 4 on become two replicas of shards (HSDP), others one (FSDP).
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import muonshard
from muonshard.demo.progress import Progress

VOCABULARY, CONTEXT = 256, 128
WIDTH, LAYERS, HEADS = 256, 4, 4
BATCH = 32
"""Sequences per step, over all processes; rounded up so that each has as many."""
LEARNING_RATES = {"adamw": 2e-3, "muon": 4e-2}
"""The best of a sweep, see examples/sweep.md."""


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of (batch, heads, time, width)."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    cos, sin, (a, b) = angles.cos().to(x.dtype), angles.sin().to(x.dtype), x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """Attention, then two layers with a squared ReLU between them; both start as nothing but a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        for into_residual in (self.attention.out, self.down):
            nn.init.zeros_(into_residual.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, time, 256); with targets, the mean loss in nats per byte."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    # what changes: the matrices inside the model go to Muon; embedding, norms and head stay with AdamW
    groups = muonshard.param_groups(model, adamw_lr=LEARNING_RATES["adamw"], adamw_betas=(0.9, 0.95))
    return muonshard.Muon(groups, lr=lr, weight_decay=0.1)


def shard(model: GPT, device: torch.device) -> None:
    """FSDP2 on every process there is: two replicas where that leaves shards to cut, else one."""
    world = dist.get_world_size()
    replicas = 2 if world >= 4 and world % 2 == 0 else 1
    mesh: DeviceMesh = init_device_mesh(
        device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
    )
    mesh = mesh if replicas > 1 else mesh["shard"]
    policy = MixedPrecisionPolicy(param_dtype=fast_dtype(device), reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it in hardware, else float32; torch before `get_capabilities` cannot say."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    has: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.bfloat16 if has.get("avx512_bf16") or has.get("amx_bf16") else torch.float32


def load_text() -> tuple[Tensor, Tensor]:
    """(training bytes, validation bytes) of the standard library; every twentieth file is held out, whole."""
    root, left_out = Path(sysconfig.get_path("stdlib")), {"site-packages", "dist-packages", "test", "tests"}
    files = sorted(path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))
    texts = [torch.frombuffer(bytearray(path.read_bytes() or b"\n"), dtype=torch.uint8) for path in files]
    if len(texts) < 100:
        raise FileNotFoundError(f"the standard library's sources should be in {root}, but few are: install them")
    return torch.cat([text for i, text in enumerate(texts) if i % 20]), torch.cat(texts[::20])


def windows(text: Tensor, starts: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """This process's share of the windows of the text that start at `starts`, and the byte that follows each byte."""
    mine = starts[dist.get_rank() :: dist.get_world_size(), None]
    tokens = text[mine + torch.arange(CONTEXT + 1)].long().to(device)
    return tokens[:, :-1], tokens[:, 1:]


@torch.no_grad()
def validate(model: nn.Module, text: Tensor, count: int, device: torch.device) -> float:
    """Mean loss over windows all along the held-out text, in nats per byte; the same windows each time."""
    loss = model(*windows(text, torch.linspace(0, len(text) - CONTEXT - 1, count).long(), device))
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


@torch.no_grad()
def write(model: nn.Module, prompt: str, length: int, device: torch.device) -> str:
    """A sample of text, written on rank 0 by a copy of the model that is not sharded."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() != 0:
        return ""
    whole, generator = GPT().to(device), torch.Generator(device).manual_seed(0)
    whole.load_state_dict(weights)
    tokens = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        chances = (whole(tokens[:, -CONTEXT:])[:, -1] / 0.6).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train, and return what there is to tell of it."""
    torch.manual_seed(0)  # the same weights on every process, of which each then keeps its shards
    model = GPT().to(device)
    shard(model, device)
    optimizer = make_optimizer(options.optimizer, model, options.lr or LEARNING_RATES[options.optimizer])
    plan = optimizer.plan if isinstance(optimizer, muonshard.Muon) else None
    if plan and dist.get_rank() == 0:
        print(plan, flush=True)
    warmup, steps = max(1, options.steps // 20), options.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup))
    )

    training, held_out = load_text()
    world = dist.get_world_size()
    sequences = -(-BATCH // world) * world
    generator = torch.Generator().manual_seed(options.seed)
    curve: list[dict[str, float]] = []
    optimizer_ms: list[float] = []
    seconds = 0.0
    with Progress(options.optimizer, steps) as progress:
        for step in range(steps + 1):
            if step % options.validate_every == 0 or step == steps:
                loss = validate(model, held_out, 4 * sequences, device)
                curve.append({"step": step, "seconds": seconds, "loss": loss})
            if step == steps:
                break
            start = now(device)
            starts = torch.randint(len(training) - CONTEXT, (sequences,), generator=generator)
            loss = model(*windows(training, starts, device))
            loss.backward()
            before = now(device)
            optimizer.step()
            end = now(device)
            optimizer.zero_grad()
            schedule.step()
            took = end - start
            seconds += took
            optimizer_ms.append(1e3 * (end - before))
            progress.show(loss.item(), sequences * CONTEXT / took, (end - before) / took)
    return {
        "optimizer": options.optimizer,
        "curve": curve,
        "optimizer_ms": optimizer_ms,
        "bytes_sent": plan.bytes_sent if plan else 0,
        "sample": write(model, "def ", 400, device),
    }


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@record
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=["muon", "adamw"], default="muon")
    parser.add_argument("--lr", type=float, help="default: the best of a sweep for this optimizer")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--validate-every", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0, help="decides the batches")
    parser.add_argument("--out", type=Path, help="where rank 0 writes losses, times and a sample, as JSON")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    told = train(options, device)
    if dist.get_rank() == 0:
        print(f"{told['optimizer']}: {told['curve'][-1]['loss']:.4f} nats per byte on held-out files")
        if options.out:
            options.out.write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
