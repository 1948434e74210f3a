"""Whether ranks that hold the same shard hold the same bits of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonshard.agreement import Circle, name_ranks, spread
from muonshard.meshes import find_residence, local_part, this_rank

Digests = dict[str, tuple[int, dict[str, str]]]
"""By parameter: which shard a rank holds of it, and a digest of the weights and of each tensor in its state."""


@dataclass
class _Copies:
    """The ranks of one mesh, and what this rank holds that others of them hold too."""

    circle: Circle
    digests: Digests = field(default_factory=dict)


def check_replicas(
    params: Iterable[tuple[str, Tensor]],
    state: Mapping[Tensor, Mapping[str, Any]],
    process_group: dist.ProcessGroup | None,
) -> None:
    """Compare the bits of all replicas: of weights, and of every tensor in the state. On all ranks together.

    Digests travel, not tensors: a few small collectives for each mesh, however many parameters there are.

    Args:
        params: (name, parameter) of each, in the same order on all ranks.
        state: what the optimizer keeps of them.
        process_group: the ranks that plain tensors are replicated over, if any.

    Raises:
        RuntimeError: on every rank of a mesh, also where its own copies are equal; it names the first parameter that
            differs, what of it differs, and the ranks.
    """
    meshes: dict[tuple[int, ...], _Copies] = {}
    for name, param in params:
        residence = find_residence(param, process_group)
        if residence is None or residence.grid.replicas == 1:
            continue
        ranks = tuple(sorted(residence.grid.seats))
        copies = meshes.setdefault(ranks, _Copies(Circle(residence.groups, [("all parameters", "")])))
        copies.digests[name] = residence.grid.seats[this_rank()].shard, _digests(param, state.get(param, {}))
    there = [copies for _, copies in sorted(meshes.items(), key=lambda item: item[0])]
    troubles = [text for copies in there for text in _differences(copies.circle.gather(copies.digests))]
    if troubles := spread([copies.circle for copies in there], troubles):
        raise RuntimeError("; ".join(troubles))


def _digests(param: Tensor, state: Mapping[str, Any]) -> dict[str, str]:
    tensors = {"weights": param} | {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return {what: _digest(tensor) for what, tensor in tensors.items()}


def _digest(tensor: Tensor) -> str:
    """Of a rank's shard: of its bits, so that NaNs are equal to themselves, and -0 is not 0."""
    flat = local_part(tensor.detach()).contiguous().cpu().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def _differences(said: dict[int, Digests]) -> list[str]:
    """The first parameter of which ranks with the same shard have other digests, if there is one."""
    for name in next(iter(said.values())):
        holders: dict[tuple[int, str], dict[str | None, list[int]]] = {}
        keys = dict.fromkeys(key for digests in said.values() for key in digests[name][1])
        for rank, digests in sorted(said.items()):
            shard, by_key = digests[name]
            for key in keys:
                holders.setdefault((shard, key), {}).setdefault(by_key.get(key), []).append(rank)
        for (_, key), voices in holders.items():
            if len(voices) > 1:
                sides = ", other than ".join(name_ranks(ranks) for ranks in voices.values())
                return [
                    f"replicas of {name} differ in {key}: {sides}. Look for gradients that were not reduced "
                    "over them or for changes made on some ranks only, and go on from a checkpoint"
                ]
    return []
