"""The other ways to save: full, asynchronous, by torch.save; and what a save or a load leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import checkpoint_cases as cases
import muonshard
import same_bits
from checkpoint_cases import Layout
from pool import Pool
from test_checkpoint_meshes import BREAK, END, state_of, take_up

LAYOUTS = [cases.fsdp, cases.hsdp, cases.fsdp_tp]


def goes_on_from(state: dict[str, Any], layout: Layout, **wishes: Any) -> list[int]:
    """Which shards differ from the unbroken run's after loading `state` into another run."""
    model, optimizer = cases.make_run(layout, start=99)
    take_up(model, optimizer, state, **wishes)
    cases.train(model, optimizer, range(BREAK, END))
    return same_bits.differing(model.parameters(), cases.unbroken(END))


def full(layout: Layout) -> tuple[list[int], bool]:
    """Gathered on rank zero and broadcast from there."""
    model, optimizer = cases.make_run(layout)
    cases.train(model, optimizer, range(BREAK))
    state = state_of(model, optimizer, full_state_dict=True, cpu_offload=True)
    differing = goes_on_from(state, layout, full_state_dict=True, broadcast_from_rank0=True)
    return differing, len(state["optimizer"]) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_state_is_on_rank_zero_and_loads_from_there(pool: Pool, layout: Layout) -> None:
    assert pool.run(4, full, layout) == [([], True), ([], False), ([], False), ([], False)]


def full_and_flat(folder: Path, layout: Layout) -> list[int]:
    """Written by rank zero, and read in shards: torch itself cannot load a state that is both full and flat."""
    model, optimizer = cases.make_run(layout)
    cases.train(model, optimizer, range(BREAK))
    dcp.save(state_of(model, optimizer, full_state_dict=True, flatten_optimizer_state_dict=True), checkpoint_id=folder)
    other, other_optimizer = cases.make_run(layout, start=99)
    state = state_of(other, other_optimizer, flatten_optimizer_state_dict=True)
    dcp.load(state, checkpoint_id=folder)
    return goes_on_from(state, layout, flatten_optimizer_state_dict=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_state_can_be_flat(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    assert pool.run(4, full_and_flat, tmp_path, layout) == [[]] * 4


def full_without_broadcast(path: Path) -> list[int]:
    """A file with whole tensors, which every rank reads and cuts for itself, by `load_state_dict` alone."""
    model, optimizer = cases.make_run(cases.fsdp)
    cases.train(model, optimizer, range(BREAK))
    wishes = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=wishes)
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()
    other = muonshard.Muon(cases.groups(model), **cases.OPTIONS, bucket_bytes=1 << 8)
    other.load_state_dict(torch.load(path))
    cases.train(model, other, range(BREAK, END))
    return same_bits.differing(model.parameters(), cases.unbroken(END))


def test_whole_tensors_are_cut_when_they_are_loaded(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(4, full_without_broadcast, tmp_path / "state.pt") == [[]] * 4


def asynchronous(folder: Path, layout: Layout) -> list[list[int]]:
    """Saved while the run goes on: it neither changes the run, nor does the run change what is saved."""
    model, optimizer = cases.make_run(layout)
    cases.train(model, optimizer, range(BREAK))
    own = dist.new_group(backend="gloo")
    saving = dcp.async_save(state_of(model, optimizer), checkpoint_id=folder, process_group=own)
    cases.train(model, optimizer, range(BREAK, END))
    saving.result()
    dist.destroy_process_group(own)
    other, other_optimizer = cases.make_run(layout, start=99)
    state = state_of(other, other_optimizer)
    dcp.load(state, checkpoint_id=folder)
    return [
        same_bits.differing(model.parameters(), cases.unbroken(END)),
        same_bits.differing(other.parameters(), cases.unbroken(BREAK)),
        goes_on_from(state, layout),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_written_while_the_run_goes_on(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    assert pool.run(4, asynchronous, tmp_path, layout) == [[[], [], []]] * 4


def torch_save(folder: Path, layout: Layout) -> list[int]:
    """A file for each rank."""
    model, optimizer = cases.make_run(layout)
    cases.train(model, optimizer, range(BREAK))
    path = folder / f"{dist.get_rank()}.pt"
    torch.save(optimizer.state_dict(), path)
    other = muonshard.Muon(cases.groups(model), **cases.OPTIONS)
    other.load_state_dict(torch.load(path, weights_only=False))
    cases.train(model, other, range(BREAK, END))
    return same_bits.differing(model.parameters(), cases.unbroken(END))


@pytest.mark.parametrize("layout", [cases.whole, cases.fsdp, cases.fsdp_tp])
def test_each_rank_can_save_its_own_part(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    world = 1 if layout is cases.whole else 4
    assert pool.run(world, torch_save, tmp_path, layout) == [[]] * world


def test_a_state_without_dtensors_is_read_safely(tmp_path: Path) -> None:
    model, optimizer = cases.make_run(cases.whole)
    cases.train(model, optimizer, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    assert (
        torch.load(tmp_path / "state.pt", weights_only=True)["param_groups"] == optimizer.state_dict()["param_groups"]
    )


def asked_before_the_first_step(layout: Layout) -> list[int]:
    model, optimizer = cases.make_run(layout)
    before = [param.detach().clone() for param in model.parameters()]
    state_of(model, optimizer)
    return [
        index
        for index, (param, value) in enumerate(zip(model.parameters(), before, strict=True))
        if not torch.equal(same_bits.local(param), same_bits.local(value))
    ]


def test_asking_for_the_state_before_the_first_step_does_not_move_weights(pool: Pool) -> None:
    assert pool.run(4, asked_before_the_first_step, cases.hsdp) == [[]] * 4
