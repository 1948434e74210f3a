"""Muon on sharded parameters, as a torch.optim.Optimizer.

    gradient shard -> momentum, on the shard -> pieces to the owners -> whole matrices, orthogonalised
      -> pieces back -> across replicas -> weight decay and update, on the shard

One process with plain tensors goes the same way; nothing travels there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from muonshard.adamw import AdamWGroups
from muonshard.buckets import Exchange
from muonshard.checkpoint import load_state
from muonshard.exchange import Shipment, lag_of, make_shipments
from muonshard.meshes import check_dense, check_gradient, make_links, make_links_apart, this_rank, work_device
from muonshard.orthogonalize import JORDAN, Orthogonalizer, flops, resolve
from muonshard.overlap import Overlap
from muonshard.owners import CostModel
from muonshard.pipeline import Pipeline, Stages
from muonshard.plan import Domain, Plan
from muonshard.planner import MACHINES, make_plan
from muonshard.precision import Precision
from muonshard.replicas import check_replicas
from muonshard.settings import Nonfinite, Settings
from muonshard.shards import Load, Route, Shard, lr_ratio, make_shard, origin_of
from muonshard.survey import UNSPLIT, Kind, named_parameters, rule_of, take_survey
from muonshard.verdict import ELSEWHERE

AdjustLr = Literal["original", "match_rms_adamw"]


class Muon(torch.optim.Optimizer):
    """Muon for parameters of any sharding, and AdamW for the rest, in one optimizer.

    A drop-in for `torch.optim.Muon`: the first nine arguments mean the same, and one process gets the same weights, up
    to the rounding of the bfloat16 iteration: some matrices are iterated in the cheaper Gram form, or in other kernels.
    Under FSDP2, HSDP, tensor or expert parallel (DTensors), or DDP (plain tensors and a `process_group`), every weight
    matrix is orthogonalised once, whole, on one rank, and the weights come out the same again.

    A parameter group may carry `algorithm="adamw"`, with `lr`, `betas`, `eps` and `weight_decay`: torch's AdamW then
    does the step. A Muon group may say how its parameters are read as matrices: `num_heads`, `splits`, `split_dim`,
    `flatten`, `transposed` (see `muonshard.MatrixRule`); a 3-D parameter is a stack of matrices.
    `muonshard.param_groups(model)` makes such groups.

    All ranks that share parameters must construct it at the same time, and step together: both communicate.

    Args:
        params: parameters, named parameters or groups of either, as for any torch optimizer.
        lr: learning rate.
        weight_decay: decoupled weight decay, multiplied by `lr`.
        momentum: decay of the momentum, a running mean of gradients.
        nesterov: whether to look one step of momentum ahead.
        ns_coefficients: (a, b, c) of the Newton-Schulz polynomial a x + b x^3 + c x^5.
        eps: smallest norm that a matrix is divided by.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: how `lr` follows the matrix's shape, see `lr_ratio`: None or "original", or "match_rms_adamw".
        orthogonalize: "newton_schulz", "polar_express", or any callable that maps a stack of matrices (batch, m, n) to
            one of the same shape.
        exchange_dtype: dtype in which momentum and updates travel; one process rounds to it too, so that every mesh
            gives the same bits.
        bucket_bytes: how much of a shard, and of an owner's matrices, one exchange carries at most (a larger matrix has
            an exchange of its own). Decides the memory a step needs, see `optimizer.arena_bytes`.
        exchange: how matrices become whole: "owner" sends each to one rank and the update back, "allgather" gathers all
            of them everywhere in one fused collective and repeats the work (where one mesh axis cuts a parameter),
            "auto" takes for each bucket what a cost model finds quicker. The bits are the same.
        overlap: "backward" sends and orthogonalises a bucket as soon as backward has made its gradients final; `step`
            only applies. Every backward must then be followed by a step (see `accumulating` for micro-batches),
            gradients must not be changed in between (no clipping, no unscaling: it is noticed, and an error), plain
            tensors under DDP are refused, and all buckets have buffers at the same time.
        process_group: the ranks that hold plain tensors in common, under DistributedDataParallel.
        nonfinite: what happens to a matrix whose momentum has become infinite or NaN: "propagate" it, as torch does;
            "skip" the matrix, which leaves its weights and momentum as they were on all ranks (see
            `optimizer.skipped`); or skip it and "raise" FloatingPointError at the end of the step, on all ranks of its
            mesh.
        momentum_dtype: dtype in which momentum is kept; None is the parameter's own.
        master_weights: whether to keep float32 copies of weights of fewer bits in the state, and to update these.
        stochastic_rounding: whether to update bfloat16 weights in float32 and round them up or down at random, so that
            they are right on average. Random bits depend on `seed`, the parameter's name, the step and the element.
        seed: of the random bits.

    Raises:
        ValueError: an option is out of range, a parameter cannot be orthogonalised, or ranks disagree; the message
            names the parameter, and it is raised on every rank that shares parameters with the one at fault.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = None,
        *,
        orthogonalize: str | Callable[[Tensor], Tensor] = "newton_schulz",
        exchange_dtype: torch.dtype = torch.bfloat16,
        bucket_bytes: int = 64 << 20,
        exchange: Exchange = "auto",
        overlap: Literal["backward"] | None = None,
        process_group: dist.ProcessGroup | None = None,
        nonfinite: Nonfinite = "propagate",
        momentum_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        precision = Precision(momentum_dtype, master_weights, stochastic_rounding, seed)
        self._settings = Settings(
            orthogonalize, exchange_dtype, bucket_bytes, exchange, overlap, process_group, nonfinite, precision
        )
        self._forget_plan()
        self.skipped: Counter[str] = Counter()
        """How many matrices of each parameter were skipped so far: those that this rank holds a piece of."""
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            **UNSPLIT,
        }
        super().__init__(params, {"algorithm": "muon", **defaults})
        self._make_plan()

    def _forget_plan(self) -> None:
        """Nothing is known yet of the parameters: as before the first plan, or in a copy of an optimizer."""
        self._adamw = AdamWGroups(self._settings.precision, self._settings.process_group)
        self._orthogonalizers: dict[Kind, Orthogonalizer] = {}
        self._signature: object = None
        self._overlap: Overlap | None = None
        self._shards: dict[int, Shard] = {}
        self._pipelines: list[Pipeline] | None = None
        self._device = torch.device("meta")
        self.arena_bytes = 0
        """Memory of the exchange buffers on this rank: allocated at the first step, and kept."""

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from; it makes its own plan when it first needs one."""
        return {**super().__getstate__(), "_settings": self._settings, "skipped": self.skipped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up a state: of a copy, or in `load_state_dict`."""
        super().__setstate__(state)
        if "_adamw" not in self.__dict__:
            self._forget_plan()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a saved state: of this class on any mesh, of `torch.optim.Muon` or of `torch.optim.AdamW`.

        Parameters are found by name where both optimizers have names, else by their place. Groups that were not saved
        stay as they are; a warning lists those that so start fresh.

        Raises:
            ValueError: entries are missing or misshapen; it names them, and nothing has changed.
        """
        load_state(self, state_dict, self._settings.precision)

    @property
    def plan(self) -> Plan:
        """Who owns what, what travels and what it costs; `print` it. Made anew when groups or their options change."""
        self._make_plan()
        return self._plan

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; on all ranks together, since the plan is made anew. States of other groups stay."""
        before = len(self.param_groups)
        if param_group.get("algorithm") == "adamw":
            super().add_param_group({**self._adamw.defaults, **param_group})
            for key in self.defaults.keys() - self._adamw.defaults.keys() - {"algorithm"}:
                del self.param_groups[-1][key]
        else:
            super().add_param_group({**param_group})
        if self._signature is not None:
            try:
                self._make_plan()
            except ValueError:
                del self.param_groups[before:]
                raise

    def check_replicas(self) -> None:
        """Compare the bits of weights and states on ranks that hold the same shards; on all ranks together.

        Raises:
            RuntimeError: on all ranks of a mesh: some differ; it names the first parameter, what of it, and the ranks.
        """
        params = [(name, param) for _, name, param in named_parameters(self.param_groups)]
        check_replicas(params, self.state, self._settings.process_group)

    def accumulating(self) -> AbstractContextManager[None]:
        """Under overlap="backward", `with optimizer.accumulating(): loss.backward()` for micro-batches before the last.

        FSDP2's `set_requires_gradient_sync(False)` does without it: its gradients are made in the last backward alone.
        """
        return self._overlap.paused() if self._overlap is not None else nullcontext()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters; on all ranks together. Returns the closure's loss, if there is a closure.

        Raises:
            ValueError: a gradient is sparse, complex or cut otherwise than its parameter; nothing has changed.
            FloatingPointError: under nonfinite="raise", a matrix is not finite; all others have been updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_plan()
        if self._overlap is not None:
            self._overlap.check()
        self._check_gradients()
        self._shards.update({tenant: self._shard(tenant) for tenant in range(len(self._survey.params))})
        self._adamw.step(self.param_groups, self.state)
        faults = self._finish()
        self._settings.precision.count_step((param, self.state[param]) for param in self._survey.params)
        self._shards.clear()
        if self._overlap is not None:
            self._overlap.reset()
        if faults:
            raise FloatingPointError("; ".join(faults))
        return loss

    def _finish(self) -> list[str]:
        """Take the buckets of each domain through the rest of the step. Returns what is to be raised."""
        faults: list[str] = []
        for pipeline, domain in zip(self._pipelines_here(), self._plan.domains, strict=True):
            if faults:
                pipeline.verdict.hear(ELSEWHERE)
            pipeline.finish()
            faults += pipeline.verdict.pronounce(domain, self._plan)
        return faults

    def _check_gradients(self) -> None:
        """Raise ValueError, before anything has changed, for a gradient that no step can be made of."""
        for param, name in self._survey.adamw:
            if param.grad is not None:
                check_dense(param.grad, name)
        for param, tenant in zip(self._survey.params, self._survey.tenants, strict=True):
            check_gradient(param, tenant.name)

    def _send(self, route: Route) -> Load:
        """Momentum, on the shard, and its pieces on their way to the owners."""
        for tenant in route.shipment.all_tenants:
            if tenant not in self._shards:
                check_gradient(self._survey.params[tenant], self._survey.tenants[tenant].name)
                self._shards[tenant] = self._shard(tenant)
        load = Load(route, self._shards, skips=self._settings.drops, early=self._settings.overlap is not None)
        route.shipment.send(load.updates(self.param_groups), load.present[: len(route.shipment.mine)])
        return load

    def _turn_round(self, load: Load) -> None:
        """The owned matrices, once they are whole: orthogonalised, and their pieces on their way back."""
        shipment = load.route.shipment
        wanted = set(shipment.receive())
        dropped: list[int] = []
        for stack in shipment.stacks:
            rows = [row for row, job in enumerate(stack.jobs) if job in wanted]
            if self._settings.drops:
                finite = stack.tensor.isfinite().flatten(1).all(1).tolist()
                dropped += [stack.jobs[row] for row in rows if not finite[row]]
                rows = [row for row in rows if finite[row]]
            orthogonalizer = self._orthogonalizer(cast(Kind, stack.kind))
            if len(rows) == len(stack.jobs):
                stack.tensor.copy_(orthogonalizer(stack.tensor))
            elif rows:
                stack.tensor[rows] = orthogonalizer(stack.tensor[rows]).to(stack.tensor.dtype)
        if self._settings.nonfinite == "raise":
            shipment.verdict.hear(*(job + 1 for job in dropped))
        shipment.give_back(dropped)

    def _apply(self, load: Load) -> None:
        """Weight decay and update, on the shard, once the replicas are level."""
        updates = load.route.shipment.updates()
        kept = load.certain if all(load.certain) else load.route.shipment.kept()
        load.apply(updates, kept, self.param_groups)
        if self._settings.drops:
            shipment = load.route.shipment
            pieces = zip(shipment.tenants, shipment.pieces, load.present, kept, strict=True)
            dropped = {(tenant, piece.job) for tenant, piece, has, keep in pieces if has and not keep}
            self.skipped.update(self._plan.tenants[tenant].name for tenant, _ in dropped)

    def _shard(self, tenant: int) -> Shard:
        param, name = self._survey.params[tenant], self._survey.tenants[tenant].name
        return make_shard(param, name, self.state[param], self._settings.precision)

    def _make_plan(self) -> None:
        """Make the plan if there is none yet, or if groups or what it depends on have changed since."""
        signature = [None if group["algorithm"] == "adamw" else plan_options(group) for group in self.param_groups]
        if signature == self._signature:
            return
        settings = self._settings
        faults = [*settings.problems(), *settings.precision.problems(named_parameters(self.param_groups))]
        survey = take_survey(self.param_groups, settings.process_group, self._cost_model, str(settings), faults)
        device = work_device(survey.params[0]).type if survey.params else "cpu"
        self._plan = make_plan(
            survey.tenants,
            this_rank(),
            settings.exchange_dtype.itemsize,
            settings.bucket_bytes,
            settings.way,
            MACHINES.get(device, MACHINES["cuda"]),
            backwards=settings.overlap is not None,
            reports=settings.nonfinite == "raise",
        )
        make = make_links_apart if settings.overlap else make_links
        self._links = [make(domain.grid, domain.seat, survey.groups[domain.grid]) for domain in self._plan.domains]
        self._survey, self._signature, self._pipelines = survey, signature, None
        if self._overlap is not None:
            self._overlap.remove()
        if settings.overlap:
            names = [tenant.name for tenant in survey.tenants]
            self._overlap = Overlap(survey.params, names, self._pipelines_here)

    def _pipelines_here(self) -> list[Pipeline]:
        """The buckets of each domain, with buffers on the device where the work is done."""
        device = work_device(self._survey.params[0]) if self._survey.params else torch.device("cpu")
        if self._pipelines is None or self._device != device:
            shipments, self.arena_bytes = make_shipments(
                self._plan, self._links, self._settings.exchange_dtype, device, at_once=self._overlap is not None
            )
            stages = Stages(self._send, self._turn_round, lambda load: load.route.shipment.level(), self._apply)
            self._pipelines = [
                Pipeline([self._make_route(shipment, domain) for shipment in members], lag_of(domain), stages)
                for members, domain in zip(shipments, self._plan.domains, strict=True)
            ]
            self._device = device
        return self._pipelines

    def _make_route(self, shipment: Shipment, domain: Domain) -> Route:
        groups = tuple(self._survey.group_of[tenant] for tenant in shipment.tenants)
        ratios = []
        for piece, index in zip(shipment.pieces, groups, strict=True):
            group, matrix = self.param_groups[index], domain.jobs[piece.job].matrix
            ratios.append(lr_ratio(group["adjust_lr_fn"], matrix.rows, matrix.cols, group["transposed"]))
        origins = tuple(origin_of(piece, domain) for piece in shipment.pieces)
        return Route(shipment, groups, tuple(ratios), origins)

    def _cost_model(self, kind: Kind) -> CostModel:
        orthogonalizer = self._orthogonalizer(kind)
        return lru_cache(maxsize=None)(lambda rows, cols: flops(orthogonalizer, rows, cols))

    def _orthogonalizer(self, kind: Kind) -> Orthogonalizer:
        if kind not in self._orthogonalizers:
            coefficients, steps, eps = kind
            self._orthogonalizers[kind] = resolve(
                self._settings.orthogonalize, coefficients=coefficients, steps=steps, eps=eps
            )
        return self._orthogonalizers[kind]


def plan_options(group: dict[str, Any]) -> tuple[object, ...]:
    """What of a Muon group the plan and the routes depend on."""
    options = tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"], group["adjust_lr_fn"]
    return tuple(map(id, group["params"])), rule_of(group), options
