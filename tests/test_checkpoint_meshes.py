"""A run goes on after a checkpoint as if it had never stopped, on whatever mesh it was saved and is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import checkpoint_cases as cases
import same_bits
from checkpoint_cases import PLACES, Layout
from pool import Pool

BREAK, END = 5, 10
OTHERWISE: dict[str, Any] = {"bucket_bytes": 1 << 8, "exchange": "allgather"}
"""Options that change what travels where, and nothing else."""


def state_of(model: cases.Model, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    wishes = StateDictOptions(**options)
    return {
        "model": get_model_state_dict(model, options=wishes),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=wishes),
    }


def take_up(model: cases.Model, optimizer: torch.optim.Optimizer, state: dict[str, Any], **options: Any) -> None:
    wishes = StateDictOptions(**options)
    set_model_state_dict(model, state["model"], options=wishes)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=wishes)


def save(folder: Path, layout: Layout, flat: bool) -> None:
    model, optimizer = cases.make_run(layout)
    cases.train(model, optimizer, range(BREAK))
    dcp.save(state_of(model, optimizer, flatten_optimizer_state_dict=flat), checkpoint_id=folder)


def load_and_go_on(folders: dict[str, Path], layout: Layout, flat: bool) -> dict[str, list[int]]:
    """By checkpoint, which shards differ from the unbroken run's in the end."""
    expected = cases.unbroken(END)
    found = {}
    for name, folder in folders.items():
        model, optimizer = cases.make_run(layout, start=99, **OTHERWISE)
        state = state_of(model, optimizer, flatten_optimizer_state_dict=flat)
        dcp.load(state, checkpoint_id=folder)
        take_up(model, optimizer, state, flatten_optimizer_state_dict=flat)
        cases.train(model, optimizer, range(BREAK, END))
        found[name] = same_bits.differing(model.parameters(), expected)
    return found


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint from each place, after five steps."""
    folders = {name: tmp_path_factory.mktemp("checkpoint") for name in PLACES}
    for name, place in PLACES.items():
        pool.run(place.world, save, folders[name], place.layout, False)
    return folders


@pytest.mark.parametrize("place", PLACES)
def test_a_run_saved_on_any_mesh_goes_on_with_the_same_bits(pool: Pool, saved: dict[str, Path], place: str) -> None:
    outcomes = pool.run(PLACES[place].world, load_and_go_on, saved, PLACES[place].layout, False)
    assert outcomes == [{name: [] for name in saved}] * PLACES[place].world


def test_a_checkpoint_can_be_flat(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, save, tmp_path, cases.fsdp_tp, True)
    assert pool.run(4, load_and_go_on, {"flat": tmp_path}, cases.hsdp, True) == [{"flat": []}] * 4
