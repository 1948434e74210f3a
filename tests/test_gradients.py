"""What a training script does to gradients before `step`: clipped, accumulated, scaled, made by a closure.

Models are sharded by FSDP2 itself. The reference is one process that gets the same gradients, whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import muonshard
import real_models
import same_bits
from pool import Pool
from same_bits import Shape

STEPS = 3
MAX_NORM = 0.05
MESHES = [(2,), (3,), (2, 2)]
Options = dict[str, Any]
OVERLAPPED: Options = {"overlap": "backward", "bucket_bytes": 1 << 10}


class Run:
    """A language model under FSDP2 or HSDP, and the same weights in one process; groups for Muon and for AdamW."""

    def __init__(self, mesh: Shape, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = real_models.Llama()
        real_models.shard_blocks(self.model, same_bits.mesh_of(mesh))
        groups = muonshard.param_groups(self.model, lr=0.05, adamw_lr=0.01)
        self.alone = {name: nn.Parameter(whole(param)) for name, param in self.model.named_parameters()}
        same_groups = [
            {**group, "params": [(name, self.alone[name]) for name, _ in group["params"]]} for group in groups
        ]
        self.exact = {name for group in groups if group["algorithm"] == "muon" for name, _ in group["params"]}
        self.optimizer = muonshard.Muon(groups, **options)
        self.reference = muonshard.Muon(same_groups)

    def loss(self, step: int) -> Tensor:
        """Of this rank's batch."""
        loss: Tensor = self.model(real_models.tokens(step, dist.get_rank()))
        return loss

    def share_gradients(self) -> None:
        """Give one process the gradients that the mesh has now."""
        for name, param in self.model.named_parameters():
            assert param.grad is not None
            self.alone[name].grad = whole(param.grad)

    def differing(self) -> list[str]:
        """Parameters that are not those of one process: to the bit for Muon, to a rounding for torch's own AdamW."""
        pairs = [(name, whole(param), self.alone[name].detach()) for name, param in self.model.named_parameters()]
        return [
            n for n, a, b in pairs if not (torch.equal(a, b) if n in self.exact else torch.allclose(a, b, atol=1e-6))
        ]

    def bits(self) -> list[Tensor]:
        """Copies of all that a step may change on this rank."""
        tensors: list[Tensor] = list(self.model.parameters())
        tensors += [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [same_bits.local(tensor).clone() for tensor in tensors]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


def world_of(mesh: Shape) -> int:
    return int(torch.tensor(mesh).prod())


def clip(mesh: Shape) -> tuple[list[str], bool, bool]:
    """What differs; whether the norm was that of the whole gradients; whether it was large enough for clipping."""
    run, right, clipped = Run(mesh), True, True
    for step in range(STEPS):
        run.loss(step).backward()
        run.share_gradients()
        norm = whole(clip_grad_norm_(run.model.parameters(), MAX_NORM))
        alone = run.alone.values()
        right &= torch.allclose(
            norm, get_total_norm(param.grad for param in alone if param.grad is not None), rtol=1e-5
        )
        clipped &= bool(norm > 2 * MAX_NORM)
        clip_grads_with_norm_(alone, MAX_NORM, norm)  # the norm's last bits depend on how it was summed
        run.optimizer.step()
        run.reference.step()
        run.optimizer.zero_grad()
    return run.differing(), right, clipped


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_clipped_before_the_step_are_those_that_count(pool: Pool, mesh: Shape) -> None:
    assert pool.run(world_of(mesh), clip, mesh) == [([], True, True)] * world_of(mesh)


def accumulate(mesh: Shape, synchronised: bool, options: Options) -> tuple[list[str], float]:
    """What differs, and how far the last gradients are from those of all micro-batches in one process, relatively."""
    run, micro_batches = Run(mesh, **options), 3
    for step in range(STEPS):
        torch.manual_seed(0)
        ideal = real_models.Llama()
        ideal.load_state_dict({name: param.detach() for name, param in run.alone.items()})
        for micro in range(micro_batches):
            last, batch = micro == micro_batches - 1, step * micro_batches + micro
            run.model.set_requires_gradient_sync(synchronised or last)
            if last or not synchronised:
                run.loss(batch).backward()
            else:
                with run.optimizer.accumulating():
                    run.loss(batch).backward()
            for rank in range(dist.get_world_size()):
                (ideal(real_models.tokens(batch, rank)) / dist.get_world_size()).backward()
        run.share_gradients()
        run.optimizer.step()
        run.reference.step()
        run.optimizer.zero_grad()
    far = [torch.dist(run.alone[n].grad, p.grad) / p.grad.norm() for n, p in ideal.named_parameters()]
    return run.differing(), max(map(float, far))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("synchronised", [True, False], ids=["each reduced", "the last reduced"])
@pytest.mark.parametrize("options", [{}, OVERLAPPED], ids=["in step", "overlapped"])
def test_gradients_accumulate_over_micro_batches(pool: Pool, mesh: Shape, synchronised: bool, options: Options) -> None:
    for differing, far in pool.run(world_of(mesh), accumulate, mesh, synchronised, options):
        assert differing == []
        assert far < 1e-4


def overflow(model: nn.Module) -> None:
    """Make one element of this rank's shards of gradients infinite."""
    shards = [same_bits.local(param.grad) for param in model.parameters() if param.grad is not None]
    next(shard for shard in shards if shard.numel()).view(-1)[0] = torch.inf


def scale(
    mesh: Shape, clipping: bool, make_scaler: Callable[[], torch.amp.GradScaler]
) -> tuple[list[str], list[bool], float]:
    """What differs, whether each step changed anything, the scale at the end; the last shard overflows in step 1."""
    run, scaler, changed = Run(mesh), make_scaler(), []
    for step in range(STEPS):
        loss = scaler.scale(run.loss(step))
        loss.backward()
        if step == 1 and dist.get_rank() % mesh[-1] == mesh[-1] - 1:
            overflow(run.model)
        scaler.unscale_(run.optimizer)
        if clipping:
            clip_grad_norm_(run.model.parameters(), MAX_NORM)
        run.share_gradients()
        before = run.bits()
        scaler.step(run.optimizer)
        scaler.update()
        changed.append(not same(before, run.bits()))
        if step != 1:
            run.reference.step()
        run.optimizer.zero_grad()
    return run.differing(), changed, scaler.get_scale()


def torchs_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10)


def sharded_scaler() -> torch.amp.GradScaler:
    assert dist.group.WORLD is not None
    return ShardedGradScaler(device="cpu", init_scale=2.0**10, process_group=dist.group.WORLD)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("clipping", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("make_scaler", [torchs_scaler, sharded_scaler], ids=["GradScaler", "ShardedGradScaler"])
def test_a_step_that_overflowed_on_one_rank_is_skipped_on_all_and_changes_nothing(
    pool: Pool, mesh: Shape, clipping: bool, make_scaler: Callable[[], torch.amp.GradScaler]
) -> None:
    for outcome in pool.run(world_of(mesh), scale, mesh, clipping, make_scaler):
        assert outcome == ([], [True, False, True], 2.0**9)


def scale_under_overlap() -> str:
    run, scaler = Run((2,), **OVERLAPPED), torchs_scaler()
    scaler.scale(run.loss(0)).backward()
    before = run.bits()
    with pytest.raises(RuntimeError) as caught:
        scaler.step(run.optimizer)
    text = f"{same(before, run.bits())}: {caught.value}"
    with torch.no_grad():
        for pipeline in run.optimizer._pipelines_here():
            pipeline.finish()  # what is on its way must arrive before groups are taken down
    return text


def test_a_scaler_is_refused_under_overlap_and_nothing_changes(pool: Pool) -> None:
    for text in pool.run(2, scale_under_overlap):
        assert text.startswith("True: the gradient of ")
        assert "unscaling" in text


def use_a_closure(mesh: Shape, options: Options) -> tuple[list[str], bool]:
    """What differs, and whether `step` returned the loss of the one time that the closure was run."""
    run, steps, losses, returned = Run(mesh, **options), iter(range(STEPS)), [], []

    def closure() -> float:
        run.optimizer.zero_grad()
        loss = run.loss(next(steps))
        loss.backward()
        run.share_gradients()
        losses.append(loss.item())
        return losses[-1]

    for _ in range(STEPS):
        returned.append(run.optimizer.step(closure))
        run.reference.step()
    return run.differing(), returned == losses


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("options", [{}, OVERLAPPED], ids=["in step", "overlapped"])
def test_a_closure_is_run_once_on_every_rank_before_the_step(pool: Pool, mesh: Shape, options: Options) -> None:
    assert pool.run(world_of(mesh), use_a_closure, mesh, options) == [([], True)] * world_of(mesh)


def scale_on_pairs_and_on_all() -> tuple[bool, float]:
    """Experts on pairs of ranks, dense weights on all; an expert overflows on rank 3. Was the step skipped here?"""
    world = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("pair", "expert"))
    experts, dense = same_bits.draw(((4, 3, 5), (8, 6)), seed=0)
    params = [
        nn.Parameter(distribute_tensor(experts, world["expert"], [Shard(0)], src_data_rank=None)),
        nn.Parameter(distribute_tensor(dense, same_bits.mesh_of((4,)), [Shard(0)], src_data_rank=None)),
    ]
    optimizer, scaler = muonshard.Muon(params, lr=0.1), sharded_scaler()
    scaler.scale(torch.ones(()))  # makes the scale
    for param in params:
        param.grad = torch.ones_like(param)
    if dist.get_rank() == 3:
        same_bits.local(params[0].grad).view(-1)[0] = torch.inf
    before = [same_bits.local(param).clone() for param in params]
    scaler.step(optimizer)
    scaler.update()
    return same(before, [same_bits.local(param) for param in params]), scaler.get_scale()


def test_a_sharded_scaler_skips_the_step_also_on_ranks_outside_the_mesh_that_overflowed(pool: Pool) -> None:
    """torch's GradScaler would skip it on the pair of ranks 2 and 3 alone."""
    assert pool.run(4, scale_on_pairs_and_on_all) == [(True, 2.0**9)] * 4


def clip_over_meshes() -> tuple[str, list[float]]:
    """torch's error for gradients on two meshes; and their norm, relatively, before and after, taken mesh by mesh."""
    torch.manual_seed(0)
    model = real_models.moe_under_expert_parallel_and_fsdp()
    model(real_models.tokens(0, dist.get_rank())).backward()
    with pytest.raises(RuntimeError) as caught:
        clip_grad_norm_(model.parameters(), MAX_NORM)
    meshes: dict[DeviceMesh, list[nn.Parameter]] = {}
    for param in model.parameters():
        assert isinstance(param, DTensor)
        meshes.setdefault(param.device_mesh, []).append(param)
    before = norm_of_whole(model)
    norm = torch.stack([whole(get_total_norm([p.grad for p in members])) for members in meshes.values()]).norm()
    for members in meshes.values():
        clip_grads_with_norm_(members, MAX_NORM, norm)
    return str(caught.value), [float(norm) / before, norm_of_whole(model) / MAX_NORM]


def norm_of_whole(model: nn.Module) -> float:
    return float(get_total_norm([whole(param.grad) for param in model.parameters()]))


def test_gradients_on_several_meshes_are_clipped_by_the_norm_of_all(pool: Pool) -> None:
    for text, ratios in pool.run(4, clip_over_meshes):
        assert "same mesh" in text
        assert ratios == pytest.approx([1, 1], rel=1e-4)
