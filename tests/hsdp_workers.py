"""What the ranks do in the tests of the shard layer. Imported by the workers of the pool."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from hsdp_cases import Case, Shape, local_tensor, whole_tensor
from muonshard import hsdp

COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(("all_", "barrier", "batch_", "broadcast", "gather", "irecv", "isend", "recv", "reduce"))
    or name.startswith(("scatter", "send"))
]

_meshes: dict[Shape, tuple[Any, DeviceMesh]] = {}


def get_mesh(shape: Shape) -> DeviceMesh:
    """A mesh of this world's ranks, made once for each world."""
    world, mesh = _meshes.get(shape, (None, None))
    if mesh is None or world is not dist.group.WORLD:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"axis{dim}" for dim in range(len(shape))))
        _meshes[shape] = (dist.group.WORLD, mesh)
    return mesh


@contextlib.contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Count the calls of torch.distributed's collectives, but not those they make themselves."""
    calls: Counter[str] = Counter()
    depth = 0

    def wrap(name: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            calls["all"] += depth == 0
            calls["gathers"] += depth == 0 and name in ("all_gather_single", "all_gather_into_tensor")
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1

        return counted

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, wrap(name, getattr(dist, name))))
        yield calls


def make_params(case: Case) -> list[Tensor]:
    mesh = get_mesh(case.mesh_shape)
    coordinate = tuple(mesh.get_coordinate())
    params = []
    for place in range(len(case.shapes)):
        whole = whole_tensor(case, place)
        params.append(
            DTensor.from_local(
                local_tensor(case, place, coordinate),
                mesh,
                case.placements(),
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
        )
    return params


def make_group(case: Case) -> hsdp.HSDPCommGroup:
    local, groups = hsdp.group_parameters_for_hsdp(make_params(case))
    assert (local, len(groups)) == ([], 1)
    return groups[0]


def same_bits(found: Tensor | None, expected: Tensor) -> bool:
    return (
        found is not None
        and (found.dtype, found.shape) == (expected.dtype, expected.shape)
        and torch.equal(found, expected)
    )


def as_torch_says(case: Case) -> list[bool]:
    """Whether torch's own shards of each tensor are those of the case."""
    mesh = get_mesh(case.mesh_shape)
    found = []
    for place, param in enumerate(make_params(case)):
        torchs = distribute_tensor(whole_tensor(case, place), mesh, case.placements(), src_data_rank=None)
        found.append(same_bits(torchs.to_local(), hsdp.to_local_if_dtensor(param)))
    return found


def round_trip(case: Case, full_tensor: bool) -> dict[str, Any]:
    """Gather all, slice each back; what this rank found, for the parent to judge. `full_tensor`: ask torch as well."""
    group = make_group(case)
    with counted_collectives() as in_metadata:
        metadata = hsdp.build_param_shard_metadata_for_group(group)
    locals_ = [hsdp.to_local_if_dtensor(param) for param in group.params]
    cache: Any = {}
    with counted_collectives() as in_gather:
        whole = hsdp.fused_allgather_dtensor_params(locals_, group.shard_pgs, group.layout_spec, metadata, cache)
    some = hsdp.fused_allgather_dtensor_params(
        locals_, group.shard_pgs, group.layout_spec, list(metadata.values()), cache, case.keep
    )
    expected = [whole_tensor(case, place) for place in range(len(case.shapes))]
    slices = [
        hsdp.chunk_update_by_layout(tensor, param, group.layout_spec, metadata[param])
        for tensor, param in zip(expected, group.params, strict=True)
    ]
    by_rule = [
        hsdp.chunk_update_by_layout(tensor, param, group.layout_spec)
        for tensor, param in zip(expected, group.params, strict=True)
        if case.uneven is None
    ]
    return {
        "layout": group.layout_spec,
        "key": group.comm_key,
        "group sizes": [[dist.get_world_size(pg) for pg in pgs] for pgs in (group.shard_pgs, group.replicate_pgs)],
        "metadata": [metadata[param] for param in group.params],
        "on records": [record.shard_meta for record in group.records],
        "collectives": (dict(in_metadata), dict(in_gather)),
        "whole": [same_bits(found, wanted) for found, wanted in zip(whole, expected, strict=True)],
        "kept": [None if found is None else same_bits(found, expected[k]) for k, found in enumerate(some)],
        "slices": [
            same_bits(found, shard) and found.is_contiguous() for found, shard in zip(slices, locals_, strict=True)
        ],
        "by rule": [
            same_bits(found, shard) and found.is_contiguous() for found, shard in zip(by_rule, locals_, strict=False)
        ],
        "torch": [
            same_bits(param.full_tensor(), wanted)
            for param, wanted in zip(group.params, expected, strict=True)
            if full_tensor
        ],
    }


def distribute(mesh_shape: Shape, placements: list[Placement], locals_: dict[Shape, Shape], shape: Shape) -> Tensor:
    """A parameter whose shard at each mesh coordinate is of the shape told."""
    mesh = get_mesh(mesh_shape)
    local = torch.zeros(locals_[tuple(mesh.get_coordinate())])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def metadata_error(mesh_shape: Shape, placements: list[Placement], locals_: dict[Shape, Shape], shape: Shape) -> str:
    """What this rank is told of a group whose second parameter has the shards given."""
    sound = distribute_tensor(torch.zeros([4] * len(shape)), get_mesh(mesh_shape), placements, src_data_rank=None)
    _, groups = hsdp.group_parameters_for_hsdp([sound, distribute(mesh_shape, placements, locals_, shape)])
    with pytest.raises(ValueError, match=r"^parameter ") as caught:
        hsdp.build_param_shard_metadata_for_group(groups[0])
    assert all(record.shard_meta is None for record in groups[0].records)
    return str(caught.value)


def gather_error(case: Case, change: str) -> tuple[str, int]:
    """The error of a call with one argument spoilt, and how many collectives ran before it."""
    group = make_group(case)
    tensors = [hsdp.to_local_if_dtensor(param) for param in group.params]
    arguments: dict[str, Any] = {
        "local_tensors": tensors,
        "shard_pgs": group.shard_pgs,
        "layout_spec": group.layout_spec,
        "param_shard_metadata": list(hsdp.build_param_shard_metadata_for_group(group).values()),
    }
    metas = arguments["param_shard_metadata"]
    rank_only = {"one rank's shape": 1}.get(change, dist.get_rank())
    spoilt: dict[str, dict[str, Any]] = {
        "dtype": {"local_tensors": [*tensors[:-1], tensors[-1].double()]},
        "first dtype": {"local_tensors": [tensors[0].double(), *tensors[1:]]},
        "device": {"local_tensors": [*tensors[:-1], tensors[-1].to("meta")]},
        "ndim": {"local_tensors": [*tensors[:-1], tensors[-1][None]]},
        "groups": {"shard_pgs": group.shard_pgs[:-1]},
        "kept": {"keep_indices": [0, len(tensors), -1]},
        "fewer metadata": {"param_shard_metadata": metas[:-1]},
        "shape": {"local_tensors": [*tensors[:-1], tensors[-1][:, :-1]]},
        "one rank's shape": {"local_tensors": [*tensors[:-1], tensors[-1][:, :-1]]},
        "other metadata": {"param_shard_metadata": [dataclasses.replace(meta, stage_metas=()) for meta in metas]},
    }
    with counted_collectives() as calls:
        if dist.get_rank() != rank_only:
            return "", calls["all"]
        with pytest.raises(ValueError, match=" ") as caught:
            hsdp.fused_allgather_dtensor_params(**(arguments | spoilt[change]))
        return str(caught.value), calls["all"]


def fsdp_over_tensor_parallel(
    mesh_shape: Shape, names: tuple[str, ...], sizes: list[tuple[int, int, int]]
) -> list[Any]:
    """Linear layers of (out, in), cut by tensor parallel along a dim, then by FSDP2, as real training makes them."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(inner, outer, bias=False) for outer, inner, _ in sizes))
    whole = [layer.weight.detach().clone() for layer in model]
    for layer, (_, _, dim) in zip(model, sizes, strict=True):
        sharded = distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(dim)], src_data_rank=None)
        layer.weight = torch.nn.Parameter(sharded)
    fully_shard(model, mesh=mesh[names[:-1]] if len(names) > 2 else mesh[names[0]])
    _, groups = hsdp.group_parameters_for_hsdp(model.parameters())
    found = []
    for group in groups:
        metadata = hsdp.build_param_shard_metadata_for_group(group)
        gathered = hsdp.fused_allgather_dtensor_params(group.params, group.shard_pgs, group.layout_spec, metadata)
        for record, tensor in zip(group.records, gathered, strict=True):
            param = record.param
            shard = hsdp.chunk_update_by_layout(whole[record.index], param, group.layout_spec, metadata[param])
            by_rule = hsdp.chunk_update_by_layout(whole[record.index], param, group.layout_spec)
            local = hsdp.to_local_if_dtensor(param.detach())
            # where tensor parallel left some ranks nothing, torch's own waits for ever
            torchs = param.detach().full_tensor() if min(tensor.shape) > 1 else tensor
            pairs = (tensor, whole[record.index]), (tensor, torchs), (shard, local), (by_rule, local)
            found.append((record.index, group.layout_spec.shard_axes, [same_bits(*pair) for pair in pairs]))
    return found


class OperatorNames(TorchDispatchMode):
    """Records the operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def gather_operators(case: Case) -> tuple[list[str], list[str], list[list[int]], bool]:
    """Operators of two calls with one cache, where its buffers lay, and whether outputs are apart from them."""
    group = make_group(case)
    tensors = [hsdp.to_local_if_dtensor(param) for param in group.params]
    metadata = hsdp.build_param_shard_metadata_for_group(group)
    cache: Any = {}
    names, places, apart = [], [], True
    for _ in range(2):
        with OperatorNames() as mode:
            found = hsdp.fused_allgather_dtensor_params(
                tensors, group.shard_pgs, group.layout_spec, metadata, buffer_cache=cache
            )
        names.append(mode.names)
        places.append([buffer.data_ptr() for buffer in cache.values()])
        wire = {buffer.untyped_storage().data_ptr() for buffer in cache.values()}
        apart &= wire.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in found)
    return names[0], names[1], places, apart


def cache_sizes(cases: list[Case]) -> list[list[int]]:
    """The buffers that a cache holds after a gather of each case, and that all came out right."""
    cache: Any = {}
    sizes = []
    for case in cases:
        group = make_group(case)
        metadata = hsdp.build_param_shard_metadata_for_group(group)
        found = hsdp.fused_allgather_dtensor_params(
            group.params, group.shard_pgs, group.layout_spec, metadata, buffer_cache=cache
        )
        assert all(same_bits(tensor, whole_tensor(case, place)) for place, tensor in enumerate(found))
        assert all(buffer.dtype == torch.uint8 for buffer in cache.values())
        sizes.append([buffer.numel() for buffer in cache.values()])
    return sizes


def gather_views(case: Case) -> bool:
    """Gather shards that are views into larger tensors, strided and offset."""
    group = make_group(case)
    metadata = hsdp.build_param_shard_metadata_for_group(group)
    views = []
    for param in group.params:
        local = hsdp.to_local_if_dtensor(param)
        rows, columns = local.shape
        around = torch.full((columns + 3, 2 * rows + 2), 77.0)
        view = around[1 : columns + 1, 1 : 2 * rows + 1 : 2].t()
        view.copy_(local)
        views.append(view)
    found = hsdp.fused_allgather_dtensor_params(views, group.shard_pgs, group.layout_spec, metadata)
    return all(same_bits(tensor, whole_tensor(case, place)) for place, tensor in enumerate(found))


def gather_without_metadata(case: Case) -> bool:
    """Shards that are all alike need no metadata."""
    group = make_group(case)
    found = hsdp.fused_allgather_dtensor_params(group.params, group.shard_pgs, group.layout_spec)
    return all(same_bits(tensor, whole_tensor(case, place)) for place, tensor in enumerate(found))


def strided_without_metadata(split_factor: int) -> str:
    """The error of gathering shards of one row each, which no split factor over 1 gives both ranks."""
    mesh = get_mesh((2,))
    placements = [_StridedShard(0, split_factor=split_factor)]
    param = DTensor.from_local(torch.zeros(1, 2), mesh, placements, run_check=False, shape=(2, 2), stride=(2, 1))
    _, groups = hsdp.group_parameters_for_hsdp([param])
    with pytest.raises(ValueError, match="split factor") as caught, counted_collectives() as calls:
        hsdp.fused_allgather_dtensor_params([param], groups[0].shard_pgs, groups[0].layout_spec)
    assert not calls
    return str(caught.value)


def gather_nothing(mesh_shape: Shape, placements: list[Placement]) -> tuple[int, bool, bool, list[Any]]:
    """A gather along no axis of more than one rank, and one of no tensors at all: no collectives, nothing copied."""
    mesh = init_device_mesh("cpu", mesh_shape)
    params = [distribute_tensor(torch.ones(3, 2), mesh, placements, src_data_rank=None) for _ in range(2)]
    _, groups = hsdp.group_parameters_for_hsdp(params)
    group = groups[0]
    with counted_collectives() as calls, torch.no_grad():
        metadata = hsdp.build_param_shard_metadata_for_group(group)
        found = hsdp.fused_allgather_dtensor_params(params, group.shard_pgs, group.layout_spec, metadata)
        some = hsdp.fused_allgather_dtensor_params(params, group.shard_pgs, group.layout_spec, keep_indices=[1])
        none = hsdp.fused_allgather_dtensor_params([], group.shard_pgs, group.layout_spec)
        same = [tensor is param.to_local() for tensor, param in zip(found, params, strict=True)]
        kept = some[0] is None and some[1] is params[1].to_local()
    return calls["all"], all(same), kept, none


class OtherTensor:
    """A distributed tensor of another library: no torch.Tensor, and it counts dims from the end."""

    def __init__(self, param: DTensor) -> None:
        self._local = param.to_local()
        self.device_mesh, self.shape, self.ndim = param.device_mesh, param.shape, param.ndim
        self.placements = [Shard(p.dim - param.ndim) if p.is_shard() else p for p in param.placements]

    def to_local(self) -> Tensor:
        return self._local


def other_librarys_tensors(case: Case) -> list[bool]:
    """Group, gather and slice tensors that are not DTensors but look like them."""
    params: list[Any] = [OtherTensor(param) for param in make_params(case)]
    local, groups = hsdp.group_parameters_for_hsdp(params)
    assert not local
    group = groups[0]
    metadata = hsdp.build_param_shard_metadata_for_group(group)
    inputs = hsdp.build_pad_ns_inputs(params, {params[0]: params[0]}, metadata)
    found = hsdp.fused_allgather_dtensor_params(params, group.shard_pgs, group.layout_spec, metadata)
    good = [inputs[0] is params[0].to_local(), group.layout_spec == make_group(case).layout_spec]
    for place, (param, whole) in enumerate(zip(params, found, strict=True)):
        good.append(same_bits(whole, whole_tensor(case, place)))
        for meta in (metadata[param], None):
            shard = hsdp.chunk_update_by_layout(whole, param, group.layout_spec, meta)
            good.append(same_bits(shard, param.to_local()))
    return good


def group_params(kinds: list[tuple[Shape, list[Placement], Shape]]) -> tuple[list[int], list[Any]]:
    """Group parameters of (mesh shape, or () for a plain tensor, placements, shape): the local ones' places, groups."""
    params = []
    for mesh_shape, placements, shape in kinds:
        tensor = torch.zeros(shape)
        if mesh_shape:
            tensor = distribute_tensor(tensor, get_mesh(mesh_shape), placements, src_data_rank=None)
        params.append(tensor)
    local, groups = hsdp.group_parameters_for_hsdp(iter(params))
    for group in groups:
        assert len(group) == len(group.records) == len(group.params)
        assert all(record.param is params[record.index] for record in group.records)
        assert all(param is record.param for param, record in zip(group.params, group.records, strict=True))
    places = {id(param): place for place, param in enumerate(params)}
    members = [
        ([record.index for record in g.records], g.comm_key, g.layout_spec, len(g.replicate_pgs), len(g.shard_pgs))
        for g in groups
    ]
    return [places[id(param)] for param in local], members


def group_errors() -> list[str]:
    """Parameters that cannot be grouped: partial sums, an unknown placement, a mesh without this rank."""
    mesh = get_mesh((3,))
    fine = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)], src_data_rank=None)
    partial = DTensor.from_local(torch.zeros(4, 4), mesh, [Partial()], run_check=False)
    unknown: Any = OtherTensor(fine)
    unknown.placements = [mock.Mock(spec=["is_replicate", "is_partial"])]
    unknown.placements[0].is_replicate.return_value = unknown.placements[0].is_partial.return_value = False
    of_a_dim: Any = OtherTensor(fine)
    of_a_dim.placements = [mock.Mock(dim=0)]
    of_a_dim.placements[0].is_replicate.return_value = False
    of_a_dim.placements[0].is_partial.return_value = True
    pair = DeviceMesh("cpu", [0, 1])
    elsewhere = distribute_tensor(torch.zeros(4, 4), pair, [Shard(0)], src_data_rank=None)
    messages = []
    for param in (partial, unknown, of_a_dim, elsewhere):
        try:
            hsdp.group_parameters_for_hsdp([fine, param])
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def slice_errors(case: Case) -> list[str]:
    """What chunk_update_by_layout says to a part of an update, a plain tensor, and shards that no rule explains."""
    group = make_group(case)
    param, spec = group.params[0], group.layout_spec
    meta = hsdp.build_param_shard_metadata_for_group(group)[param]
    update = torch.zeros(param.shape)
    calls: list[tuple[Any, ...]] = [
        (update[:-1], param, spec, meta),
        (update[:-1], param, spec),
        (update, update, spec),
        (update, param, spec),
    ]
    messages = []
    for arguments in calls:
        with pytest.raises(ValueError, match=" ") as caught:
            hsdp.chunk_update_by_layout(*arguments)
        messages.append(str(caught.value))
    return messages


def slice_is_view(case: Case) -> list[bool]:
    """For each parameter, whether this rank's slice of an update shares its memory."""
    group = make_group(case)
    metadata = hsdp.build_param_shard_metadata_for_group(group)
    shared = []
    for param in group.params:
        update = torch.zeros(param.shape)
        mine = hsdp.chunk_update_by_layout(update, param, group.layout_spec, metadata[param])
        shared.append(mine.untyped_storage().data_ptr() == update.untyped_storage().data_ptr())
    return shared


def pad_inputs(case: Case) -> dict[str, Any]:
    """What build_pad_ns_inputs makes of missing inputs, and says of wrong ones."""
    group = make_group(case)
    params = group.params
    shapes = [tuple(hsdp.to_local_if_dtensor(param).shape) for param in params]
    given = torch.randn(shapes[1], dtype=torch.bfloat16)
    before = hsdp.build_pad_ns_inputs(group.records, {params[1]: given, params[0]: None})
    metadata = hsdp.build_param_shard_metadata_for_group(group)
    calls = {
        "data": before,
        "records": hsdp.build_pad_ns_inputs(group.records, {params[1]: given}),
        "metadata": hsdp.build_pad_ns_inputs(params, {params[1]: given}, metadata),
        "none given": hsdp.build_pad_ns_inputs(params, {}),
    }
    other = dataclasses.replace(metadata[params[0]], local_shape=(1, 2))
    told = [hsdp.build_pad_ns_inputs([params[0]], {}, {params[0]: other})[0].shape]
    told.append(hsdp.build_pad_ns_inputs([dataclasses.replace(group.records[0], shard_meta=other)], {})[0].shape)
    told.append(hsdp.build_pad_ns_inputs(group.records[:1], {}, {params[0]: other})[0].shape)
    messages = []
    for wrong in ({params[1]: given[:, :-1]}, {params[0]: torch.zeros(shapes[0]), params[1]: given}):
        with pytest.raises(ValueError, match="comm_params") as caught:
            hsdp.build_pad_ns_inputs(params, wrong)
        messages.append(str(caught.value))
    return {
        "shapes": [[tuple(tensor.shape) for tensor in tensors] == shapes for tensors in calls.values()],
        "dtypes": {name: {tensor.dtype for tensor in tensors} for name, tensors in calls.items()},
        "passed on": all(calls[name][1] is given for name in ("data", "records", "metadata")),
        "zeros": all(not tensors[0].any() and not tensors[2].any() for tensors in calls.values()),
        "told": [tuple(shape) for shape in told],
        "errors": messages,
        "shape": (shapes[0], shapes[1]),
    }


def log_lines(case: Case, level: int) -> list[tuple[str, int, str]]:
    """The records that logging receives on this rank."""
    group = make_group(case)
    metadata = hsdp.build_param_shard_metadata_for_group(group)
    return captured_log(group, metadata, level)


def captured_log(group: hsdp.HSDPCommGroup, metadata: Any, level: int) -> list[tuple[str, int, str]]:
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.name, record.levelno, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("muonshard")
    logger.addHandler(handler)
    try:
        logger.setLevel(level)
        hsdp.log_param_shard_metadata(group, metadata)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return lines


def metadata_of_nothing() -> tuple[dict[Any, Any], int]:
    """A group that holds no parameters."""
    group = make_group(Case((2,), ((4, 4),), ((0, 0, 1),)))
    group.records.clear()
    with counted_collectives() as calls:
        return hsdp.build_param_shard_metadata_for_group(group), calls["all"]


@contextlib.contextmanager
def watched_gathers() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The (received, sent) tensors of every all-gather."""
    seen: list[tuple[Tensor, Tensor]] = []

    def watch(function: Any) -> Any:
        def watched(received: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append((received, sent))
            return function(received, sent, *args, **kwargs)

        return watched

    names = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]
    with contextlib.ExitStack() as stack:
        for name in names[:1]:
            stack.enter_context(mock.patch.object(dist, name, watch(getattr(dist, name))))
        yield seen


def sends_in_place(case: Case) -> list[tuple[int, int, int]]:
    """For each axis: where in the received buffer the sent part lies, its bytes, and this rank's place on the axis."""
    group = make_group(case)
    metadata = hsdp.build_param_shard_metadata_for_group(group)
    with watched_gathers() as seen:
        hsdp.fused_allgather_dtensor_params(group.params, group.shard_pgs, group.layout_spec, metadata)
    return [
        (sent.data_ptr() - received.data_ptr(), sent.nbytes, dist.get_rank(pg))
        for (received, sent), pg in zip(seen, group.shard_pgs, strict=True)
    ]


def metadata_device(case: Case) -> list[str]:
    """The devices of what is sent and received for the metadata of CPU shards on a mesh of another device."""
    params: list[Any] = [OtherTensor(param) for param in make_params(case)]
    for param in params:
        mesh = param.device_mesh
        param.device_mesh = mock.Mock(wraps=mesh, shape=mesh.shape, mesh=mesh.mesh, device_type="meta")
    _, groups = hsdp.group_parameters_for_hsdp(params)
    with mock.patch("muonshard.hsdp.metadata.all_gather") as gather, contextlib.suppress(NotImplementedError):
        hsdp.build_param_shard_metadata_for_group(groups[0])  # there are no values to read on the meta device
    received, sent, _ = gather.call_args.args
    return [received.device.type, sent.device.type]


def outside_autograd(case: Case) -> list[bool]:
    """Whether results require gradients where everything given does."""
    group = make_group(case)
    params = [param.requires_grad_() for param in group.params]
    spec, metadata = group.layout_spec, hsdp.build_param_shard_metadata_for_group(group)
    found = hsdp.fused_allgather_dtensor_params(params, group.shard_pgs, spec, metadata)
    update = torch.ones(params[0].shape, requires_grad=True)
    inputs = hsdp.build_pad_ns_inputs(params, {params[0]: params[0]}, metadata)
    chunks = [hsdp.chunk_update_by_layout(update, params[0], spec, meta) for meta in (metadata[params[0]], None)]
    return [tensor.grad_fn is not None for tensor in [*found, *inputs, *chunks]]


def gather_none(case: Case) -> tuple[list[Any], int]:
    """A gather of no tensors along axes of several ranks."""
    group = make_group(case)
    with counted_collectives() as calls:
        return hsdp.fused_allgather_dtensor_params([], group.shard_pgs, group.layout_spec), calls["all"]
