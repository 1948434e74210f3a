"""Ranks that do not agree, or of which one has something wrong, all hear of it when the optimizer is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import muonshard
from muonshard.agreement import text_of
from pool import Pool

Named = list[tuple[str, nn.Parameter]]
Layout = Callable[[int, dict[str, Tensor]], tuple[Named, dict[str, Any]]]


def on(mesh: DeviceMesh, placements: list[Any], whole: dict[str, Tensor]) -> Named:
    """Parameters on a mesh."""
    return [
        (name, nn.Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None)))
        for name, value in whole.items()
    ]


@functools.cache
def _mesh_in(world: dist.ProcessGroup, shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("column", "row")[-len(shape) :])


def mesh_of(*shape: int) -> DeviceMesh:
    """The mesh of that shape: always the same object, since torch takes an earlier one's groups for an equal mesh."""
    assert dist.group.WORLD is not None
    return _mesh_in(dist.group.WORLD, shape)


def sharded(world: int, whole: dict[str, Tensor]) -> tuple[Named, dict[str, Any]]:
    return on(mesh_of(world), [Shard(0)], whole), {}


def hybrid(world: int, whole: dict[str, Tensor]) -> tuple[Named, dict[str, Any]]:
    return on(mesh_of(2, world // 2), [Replicate(), Shard(0)], whole), {}


def data_parallel(world: int, whole: dict[str, Tensor]) -> tuple[Named, dict[str, Any]]:
    return [(name, nn.Parameter(value)) for name, value in whole.items()], {"process_group": dist.group.WORLD}


def submesh(world: int, whole: dict[str, Tensor]) -> tuple[Named, dict[str, Any]]:
    """Each half of the world has a mesh of its own."""
    return on(mesh_of(2, world // 2)["row"], [Shard(0)], whole), {}


def usual() -> dict[str, Tensor]:
    return {"first": torch.ones(6, 4), "second": torch.ones(4, 8), "third": torch.ones(4, 4)}


def other_shape() -> dict[str, Any]:
    return {"whole": usual() | {"second": torch.ones(8, 8)}}


def other_order() -> dict[str, Any]:
    return {"whole": dict(sorted(usual().items(), reverse=True))}


def other_name() -> dict[str, Any]:
    return {"whole": {name.replace("second", "zweiter"): value for name, value in usual().items()}}


def other_dtype() -> dict[str, Any]:
    return {"whole": usual() | {"second": torch.ones(4, 8, dtype=torch.bfloat16)}}


def one_missing() -> dict[str, Any]:
    return {"whole": {name: value for name, value in usual().items() if name != "second"}}


def one_more() -> dict[str, Any]:
    return {"whole": usual() | {"fourth": torch.ones(4, 4)}}


def option(**options: Any) -> dict[str, Any]:
    return {"options": options}


def try_to_make(layout: Layout, at_fault: int, fault: dict[str, Any]) -> str:
    """Make an optimizer, otherwise on one rank. Returns what its error says; nothing may have changed by then."""
    mine = fault if dist.get_rank() == at_fault else {}
    params, options = layout(dist.get_world_size(), mine.get("whole", usual()))
    before = [param.detach().clone() for _, param in params]
    with pytest.raises(ValueError, match=r"\w+") as caught:
        muonshard.Muon(params, **{"lr": 0.02} | options | mine.get("options", {}))
    for (_, param), value in zip(params, before, strict=True):
        pieces = [t.to_local() if isinstance(t, DTensor) else t for t in (param.detach(), value)]
        assert torch.equal(*pieces)
        assert param.grad is None
    return str(caught.value)


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "shape": (other_shape(), "second"),
    "order": (other_order(), "first / third"),
    "name": (other_name(), "second / zweiter"),
    "dtype": (other_dtype(), "second"),
    "missing": (one_missing(), "second / third"),
    "additional": (one_more(), "fourth"),
    "bucket_bytes": (option(bucket_bytes=1 << 10), "bucket_bytes=1024"),
    "exchange_dtype": (option(exchange_dtype=torch.float32), "exchange_dtype=torch.float32"),
    "exchange": (option(exchange="owner"), "exchange='owner'"),
    "orthogonalize": (option(orthogonalize=torch.clone), "orthogonalize="),
    "nonfinite": (option(nonfinite="skip"), "nonfinite='skip'"),
    "ns_steps": (option(ns_steps=3), "first"),
    "ns_coefficients": (option(ns_coefficients=(2.0, -1.5, 0.5)), "first"),
    "lr": (option(lr=0.03), "lr=0.03"),
    "tensor lr": (option(lr=torch.tensor(0.03)), "lr=0.029999"),
    "weight_decay": (option(weight_decay=0.3), "weight_decay=0.3"),
    "momentum": (option(momentum=0.3), "momentum=0.3"),
    "nesterov": (option(nesterov=False), "nesterov=False"),
    "adjust_lr_fn": (option(adjust_lr_fn="match_rms_adamw"), "adjust_lr_fn='match_rms_adamw'"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_every_rank_hears_what_one_rank_has_otherwise(pool: Pool, case: str) -> None:
    fault, subject = DIFFERENCES[case]
    errors = pool.run(2, try_to_make, sharded, 1, fault)
    assert len(set(errors)) == 1
    assert errors[0].startswith("ranks disagree about ")
    assert subject in errors[0]
    assert "rank 0: " in errors[0]
    assert "rank 1: " in errors[0]


@pytest.mark.parametrize("layout", [sharded, hybrid, data_parallel])
@pytest.mark.parametrize("case", ["shape", "missing", "bucket_bytes"])
def test_four_ranks_hear_which_of_them_is_otherwise(pool: Pool, layout: Layout, case: str) -> None:
    fault, subject = DIFFERENCES[case]
    errors = pool.run(4, try_to_make, layout, 2, fault)
    assert len(set(errors)) == 1
    assert subject in errors[0]
    assert "ranks 0, 1, 3: " in errors[0]
    assert "rank 2: " in errors[0]


def try_on_a_submesh(fault: dict[str, Any]) -> str | None:
    """The half of rank 0 and 1 agrees; that of 2 and 3 does not."""
    if dist.get_rank() < 2:
        params, _ = submesh(4, usual())
        muonshard.Muon(params, lr=0.02)
        return None
    return try_to_make(submesh, 3, fault)


@pytest.mark.parametrize("case", ["shape", "missing", "lr"])
def test_ranks_that_share_nothing_with_those_that_disagree_are_not_disturbed(pool: Pool, case: str) -> None:
    fault, subject = DIFFERENCES[case]
    errors = pool.run(4, try_on_a_submesh, fault)
    assert errors[:2] == [None, None]
    assert errors[2] == errors[3]
    assert subject in errors[2]
    assert "rank 3: " in errors[2]


def try_on_two_meshes(at_fault: int) -> str:
    """Parameters along the rows of a 2 x 2 mesh, and others along its columns: no rank shares any with its opposite."""
    mesh = mesh_of(2, 2)
    odd = dist.get_rank() == at_fault
    params = on(mesh["row"], [Shard(0)], {"along rows": torch.ones(8 if odd else 4, 4)})
    params += on(mesh["column"], [Shard(0)], {"along columns": torch.ones(4, 4)})
    with pytest.raises(ValueError, match="along rows") as caught:
        muonshard.Muon(params)
    return str(caught.value)


@pytest.mark.parametrize("at_fault", range(4))
def test_trouble_on_one_mesh_reaches_those_who_share_another_with_it(pool: Pool, at_fault: int) -> None:
    errors = pool.run(4, try_on_two_meshes, at_fault)
    assert all(f"rank {at_fault}: " in error for error in errors)


def bad_dtype() -> dict[str, Any]:
    return {"whole": usual() | {"second": torch.ones(4, 8, dtype=torch.complex64)}}


def bad_dims() -> dict[str, Any]:
    return {"whole": usual() | {"second": torch.ones(4, 8, 2, 2)}}


PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "complex": (bad_dtype(), "second has dtype torch.complex64: Muon takes real floating point parameters"),
    "four dims": (bad_dims(), "second cannot be read as matrices: shape (4, 8, 2, 2)"),
    "negative lr": (option(lr=-1.0), "parameter group 0: lr must be >= 0, got -1.0"),
    "lr of two": (option(lr=torch.ones(2)), "a tensor lr must have one element"),
    "too many steps": (option(ns_steps=100), "ns_steps must be at least 0 and below 100, got 100"),
    "two coefficients": (option(ns_coefficients=(1.0, 2.0)), "ns_coefficients must be three numbers"),
    "unknown adjust_lr_fn": (option(adjust_lr_fn="other"), "adjust_lr_fn must be None"),
    "unknown orthogonalize": (option(orthogonalize="svd"), "orthogonalize='svd' is unknown"),
    "no bucket": (option(bucket_bytes=0), "bucket_bytes must be positive, got 0"),
    "integer exchange": (option(exchange_dtype=torch.int8), "exchange_dtype must be a floating point dtype"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(pool: Pool, case: str) -> None:
    fault, message = PROBLEMS[case]
    errors = pool.run(2, try_to_make, sharded, 1, fault)
    assert len(set(errors)) == 1
    assert f"{message}" in errors[0]
    assert "(on rank 1)" in errors[0]


def try_local_tensors(make: Callable[[DeviceMesh, Tensor], Tensor]) -> str:
    """Rank 1 has made one DTensor by itself, in a way that its placements do not bear out."""
    mesh = mesh_of(2)
    params = on(mesh, [Shard(0)], usual())
    if dist.get_rank() == 1:
        params[1] = ("second", nn.Parameter(make(mesh, torch.ones(2, 8))))
    with pytest.raises(ValueError, match="second") as caught:
        muonshard.Muon(params)
    return str(caught.value)


def sum_to_be_made(mesh: DeviceMesh, local: Tensor) -> Tensor:
    return DTensor.from_local(local, mesh, [Partial()], run_check=False)


def shard_too_large(mesh: DeviceMesh, local: Tensor) -> Tensor:
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((2, 8)), stride=(8, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (sum_to_be_made, r"second has placement .*, sums that are still to be made: redistribute it"),
        (
            shard_too_large,
            r"second holds a shard of shape \(2, 8\), but placements and global shape \(2, 8\) give \(1, 8\)",
        ),
    ],
)
def test_a_tensor_that_one_rank_made_wrongly_is_an_error_on_all(
    pool: Pool, make: Callable[[DeviceMesh, Tensor], Tensor], message: str
) -> None:
    errors = pool.run(2, try_local_tensors, make)
    assert len(set(errors)) == 1
    assert "(on rank 1)" in errors[0]
    with pytest.raises(ValueError, match=message):
        raise ValueError(errors[0])


def try_adamw_on_one_rank() -> str:
    mesh = mesh_of(2)
    algorithm = "muon" if dist.get_rank() == 0 else "adamw"
    with pytest.raises(ValueError, match="first") as caught:
        muonshard.Muon([{"params": on(mesh, [Shard(0)], usual()), "algorithm": algorithm}])
    return str(caught.value)


def test_a_parameter_that_only_one_rank_gives_to_muon_is_an_error_on_all(pool: Pool) -> None:
    errors = pool.run(2, try_adamw_on_one_rank)
    assert len(set(errors)) == 1
    assert "for AdamW" in errors[0]


def try_to_add_a_group() -> tuple[list[str], int]:
    """A group that differs between ranks is refused by all of them, who then go on without it."""
    mesh = mesh_of(2)
    params = on(mesh, [Shard(0)], usual())
    optimizer = muonshard.Muon(params[:1])
    errors = []
    for lr in (0.1 * (1 + dist.get_rank()), -1.0 * dist.get_rank()):
        with pytest.raises(ValueError, match=r"second|lr must be") as caught:
            optimizer.add_param_group({"params": params[1:], "lr": lr})
        errors.append(str(caught.value))
    for _, param in params:
        param.grad = param.detach().clone()
    optimizer.step()
    return errors, len(optimizer.param_groups)


def test_a_group_that_ranks_disagree_about_is_refused_and_the_run_goes_on(pool: Pool) -> None:
    (errors, groups), others = pool.run(2, try_to_add_a_group)
    assert (errors, groups) == others
    assert groups == 1


def halve(stack: Tensor, factor: float = 0.5) -> Tensor:
    return stack * factor


def agree_about(options: dict[str, Any]) -> None:
    params, _ = sharded(2, usual())
    muonshard.Muon(params, **options)


@pytest.mark.parametrize(
    "options",
    [{"orthogonalize": halve}, {"orthogonalize": functools.partial(halve, factor=0.25)}, {"lr": torch.tensor(0.5)}],
    ids=["function", "partial", "tensor lr"],
)
def test_equal_options_are_equal_though_they_lie_elsewhere_in_each_process(pool: Pool, options: dict[str, Any]) -> None:
    assert pool.run(2, agree_about, options) == [None, None]


def test_the_text_of_an_option_does_not_say_where_it_lies() -> None:
    assert text_of(object()) == text_of(object()) == "<object object>"
    assert text_of(torch.tensor([0.5])) == text_of(0.5) == "0.5"
    assert text_of(halve) != text_of(agree_about)


def forget_the_parameters_of_one_rank() -> None:
    mesh = mesh_of(2)
    params = on(mesh, [Shard(0)], usual())
    if dist.get_rank() == 0:
        muonshard.Muon(params)


def test_a_rank_that_makes_no_optimizer_is_named_when_the_groups_time_is_over(pool: Pool) -> None:
    outcomes = pool.outcomes(2, forget_the_parameters_of_one_rank, group_timeout=timedelta(seconds=2))
    assert "ranks 0, 1 could not compare their parameters" in (outcomes[0].error or "")
    assert "its part of third" in (outcomes[0].error or "")
