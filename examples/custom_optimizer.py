"""An optimizer of one's own on the shard layer: steepest descent under the spectral norm, momentum / |momentum|_2.

    torchrun --nproc-per-node 4 examples/custom_optimizer.py

It needs every matrix whole, as Muon does, and gets them with one all-gather for each mesh axis that cuts them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from muonshard import hsdp


class SpectralDescent(torch.optim.Optimizer):
    """Each step moves every matrix by `lr` in spectral norm, whatever the mesh that it lies on."""

    def __init__(self, params: list[Tensor], lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.local, self.sharded = hsdp.group_parameters_for_hsdp(params)
        self.metadata = [hsdp.build_param_shard_metadata_for_group(group) for group in self.sharded]
        self.buffers: dict[tuple[torch.device, int], Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        averages = {param: self.average(param) for param in self.param_groups[0]["params"] if param.grad is not None}
        for param in self.local:
            if param in averages:
                self.move(param, averages[param] / torch.linalg.matrix_norm(averages[param], 2))
        for group, meta in zip(self.sharded, self.metadata, strict=True):
            layout = group.layout_spec
            shards = hsdp.build_pad_ns_inputs(group.params, averages, meta)
            wholes = hsdp.fused_allgather_dtensor_params(shards, group.shard_pgs, layout, meta, self.buffers)
            for param, whole in zip(group.params, wholes, strict=True):
                direction = whole / torch.linalg.matrix_norm(whole, 2)
                self.move(param, hsdp.chunk_update_by_layout(direction, param, layout, meta[param]))

    def average(self, param: Tensor) -> Tensor:
        grad = hsdp.to_local_if_dtensor(param.grad)
        momentum = self.state[param].setdefault("momentum", torch.zeros_like(grad))
        return momentum.mul_(self.param_groups[0]["momentum"]).add_(grad)

    def move(self, param: Tensor, direction: Tensor) -> None:
        hsdp.to_local_if_dtensor(param).sub_(direction, alpha=self.param_groups[0]["lr"])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same model and data on every rank
    model = nn.Sequential(nn.Linear(10, 33, bias=False), nn.Tanh(), nn.Linear(33, 3, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = SpectralDescent(list(model.parameters()))
    inputs, targets = torch.randn(64, 10), torch.randn(64, 3)
    for step in range(20):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
