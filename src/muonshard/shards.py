"""What a rank does on its own shards, elementwise: momentum before a bucket travels, weight decay and update after.

Momentum of a piece is moved in place at once where it is certain that the piece takes part in the step. Where that
is decided elsewhere (this rank has no gradient but others may; matrices that are not finite are skipped), the update
is computed aside, and momentum moves when the answer has come back with the update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from muonshard._torch import foreach_add_, foreach_copy_, foreach_lerp, foreach_lerp_, foreach_mul_
from muonshard.exchange import Shipment
from muonshard.meshes import local_gradient, local_part
from muonshard.plan import Domain, Piece
from muonshard.precision import Precision, State, Weights, make_weights, view

Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Shard:
    """What this rank holds of one parameter; `grad` is None where it has none."""

    weights: Weights
    momentum: Tensor
    grad: Tensor | None


@dataclass(frozen=True)
class Route:
    """A shipment; for each of its pieces (`mine`, then `theirs`) its group, learning rate's ratio and origin."""

    shipment: Shipment
    groups: tuple[int, ...]
    ratios: tuple[float, ...]
    origins: tuple[tuple[int, ...], ...]

    @cached_property
    def by_group(self) -> list[tuple[int, list[int]]]:
        """Each group, with the places of its pieces."""
        return _sorted_out(self.groups)

    @cached_property
    def by_ratio(self) -> list[tuple[tuple[int, float], list[int]]]:
        """Each (group, ratio), with the places of its pieces."""
        return _sorted_out(tuple(zip(self.groups, self.ratios, strict=True)))


def lr_ratio(adjust_lr_fn: str | None, rows: int, cols: int, transposed: bool) -> float:
    """What the learning rate of a (rows, cols) matrix is multiplied by; it is (out, in), or (in, out) if transposed.

    "original" and None: sqrt(max(1, out / in)), Jordan et al. 2024. "match_rms_adamw": 0.2 sqrt(max(out, in)), Liu et
    al. 2025 (arXiv 2502.16982). As in torch.optim.Muon.
    """
    fan_out, fan_in = (cols, rows) if transposed else (rows, cols)
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(fan_out, fan_in))
    return math.sqrt(max(1, fan_out / fan_in))


def make_shard(param: Tensor, name: str, state: State, precision: Precision) -> Shard:
    """This rank's part of a parameter, its momentum (made if there is none yet) and its gradient.

    Raises:
        ValueError: a gradient of a kind that cannot be used; it names the parameter.
    """
    if "momentum_buffer" not in state:
        dtype = precision.dtype_of("momentum_buffer", param)
        state["momentum_buffer"] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    momentum = local_part(state["momentum_buffer"])
    grad = None if param.grad is None else local_gradient(param.grad, name).to(momentum.dtype)
    return Shard(make_weights(param, name, state, precision), momentum, grad)


def origin_of(piece: Piece, domain: Domain) -> tuple[int, ...]:
    """The place of a piece's first element in the whole tensor."""
    box = domain.jobs[piece.job].matrix.box
    return tuple(start + part.start for (start, _), part in zip(box, piece.where.inner, strict=True))


class Load:
    """The shards' side of one bucket in a step.

    Args:
        route: the bucket.
        shards: by tenant, at least those of the bucket.
        skips: whether its owner may yet skip a matrix.
        early: whether it is sent before the step, in which alone momentum may move.
    """

    def __init__(self, route: Route, shards: Mapping[int, Shard], skips: bool, early: bool = False) -> None:
        self.route = route
        held = [shards[tenant] for tenant in route.shipment.tenants]
        self._wheres = wheres = [piece.where for piece in route.shipment.pieces]
        self.present = [shard.grad is not None for shard in held]
        self.certain = [has and not skips for has in self.present]
        self._moves = [certain and not early for certain in self.certain]
        self._weights = [shard.weights for shard in held]
        self._momenta = [view(shard.momentum, where) for shard, where in zip(held, wheres, strict=True)]
        self._grads = [
            view(shard.grad, where) if shard.grad is not None else torch.zeros_like(momentum)
            for shard, where, momentum in zip(held, wheres, self._momenta, strict=True)
        ]

    def updates(self, groups: Groups) -> list[Tensor]:
        """Move the momentum of pieces that are certain, and return what is to be orthogonalised, for each of `mine`.

        B <- lerp(B, G, 1 - momentum); the update is lerp(G, B, momentum) with Nesterov's look ahead, else B.
        """
        mine = len(self.route.shipment.mine)
        updates: dict[int, Tensor] = {}
        for index, members in self.route.by_group:
            momentum = groups[index]["momentum"]
            self._move_momentum([i for i in members if self._moves[i]], momentum)
            moved = dict(zip(members, _pick(self._momenta, members), strict=True))
            aside = [i for i in members if i < mine and not self._moves[i]]
            ahead = foreach_lerp(_pick(self._momenta, aside), _pick(self._grads, aside), 1 - momentum)
            moved |= zip(aside, ahead, strict=True)
            own = [i for i in members if i < mine]
            results = [moved[i] for i in own]
            if groups[index]["nesterov"]:
                results = foreach_lerp(_pick(self._grads, own), results, momentum)
            updates |= zip(own, results, strict=True)
        return [updates[i] for i in range(mine)]

    def apply(self, updates: list[Tensor], kept: Sequence[bool], groups: Groups) -> None:
        """P <- (1 - lr weight_decay) P - lr ratio U for pieces that are kept, whose momentum moves if it has not."""
        for index, members in self.route.by_group:
            late = [i for i in members if kept[i] and not self._moves[i]]
            self._move_momentum(late, groups[index]["momentum"])
        for (index, ratio), members in self.route.by_ratio:
            chosen = [i for i in members if kept[i]]
            lr = groups[index]["lr"]  # a tensor's products are rounded in its own dtype, as torch.optim.Muon does
            weights = [self._weights[i].widen(self._wheres[i]) for i in chosen]
            foreach_mul_(weights, float(1 - lr * groups[index]["weight_decay"]))
            arrived = [updates[i].to(wide.device) for i, wide in zip(chosen, weights, strict=True)]  # offloaded shards
            _add(weights, arrived, -float(lr * ratio))
            for i, wide in zip(chosen, weights, strict=True):
                self._weights[i].narrow(self._wheres[i], wide, self.route.origins[i])

    def _move_momentum(self, places: list[int], momentum: float) -> None:
        foreach_lerp_(_pick(self._momenta, places), _pick(self._grads, places), 1 - momentum)


def _add(params: list[Tensor], updates: list[Tensor], alpha: float) -> None:
    """`param + alpha update`, rounded once.

    Half precision goes through float32: torch's own kernels round strided pieces differently from whole tensors.
    """
    wide = [param if param.dtype.itemsize > 2 else param.float() for param in params]
    foreach_add_(wide, updates, alpha)
    narrow = [(param, sum_) for param, sum_ in zip(params, wide, strict=True) if param is not sum_]
    foreach_copy_([param for param, _ in narrow], [sum_ for _, sum_ in narrow])


def _pick(tensors: list[Tensor], places: list[int]) -> list[Tensor]:
    return [tensors[place] for place in places]


def _sorted_out(keys: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    places: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return list(places.items())
