"""The demo, small: it runs, tells the truth, and ends when a process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muonshard import cli
from muonshard.demo import runs, table
from muonshard.demo.picture import draw
from muonshard.demo.runs import Run, first_at


def _run(optimizer: str, losses: tuple[float, ...]) -> Run:
    steps = tuple(20.0 * i for i in range(len(losses)))
    return Run(optimizer, steps, tuple(s / 2 for s in steps), losses, (3.0, 1.0, 2.0), 3_000_000, "def f(): pass")


def test_the_step_at_which_a_loss_is_reached_lies_between_the_points_around_it() -> None:
    assert first_at((0.0, 10.0, 20.0), (5.0, 3.0, 1.0), 2.0) == 15.0
    assert first_at((0.0, 10.0), (5.0, 3.0), 5.0) == 0.0
    assert first_at((0.0, 10.0), (5.0, 3.0), 1.0) is None


def test_the_verdict_says_by_how_many_steps_muon_was_faster_or_that_it_was_not() -> None:
    adamw, muon = _run("adamw", (5.0, 3.0, 2.0)), _run("muon", (5.0, 2.0, 1.5))
    assert "after 20 of 40 steps (2.00x fewer) and 10 of 20 seconds" in table.verdict([adamw, muon])
    assert "did not reach" in table.verdict([muon, adamw])
    assert ("optimizer, ms per step (median)", "2.0", "2.0") in table.rows([adamw, muon])


def test_the_picture_is_written(tmp_path: Path) -> None:
    draw([_run("adamw", (5.0, 3.0, 2.0)), _run("muon", (5.0, 2.0, 1.5))], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_trains_both_ways_and_prints_a_table_and_a_sample(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "muonshard.cli", "demo", "--steps=3", "--processes=2", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert (tmp_path / "loss.png").exists()
    assert "validation loss at the end" in done.stdout
    assert "what the muon model writes" in done.stdout
    adamw, muon = runs.load(tmp_path / "adamw.json"), runs.load(tmp_path / "muon.json")
    assert adamw.losses[-1] < adamw.losses[0]
    assert muon.losses[0] == adamw.losses[0]
    assert adamw.bytes_sent == 0 < muon.bytes_sent
    assert muon.sample.startswith("def ")


def test_a_process_that_fails_ends_the_demo_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n    raise ValueError('rank 1 gives up')\n"
        "dist.barrier()\n"
    )
    monkeypatch.setattr(runs, "SCRIPT", script)
    assert cli.main(["demo", "--processes=2", f"--out={tmp_path}"]) == 1
    assert "rank 1 gives up" in capfd.readouterr().err
    own = str(script)
    alive = [pid for pid in os.listdir("/proc") if pid.isdigit() and own in _command_of(pid)]
    assert alive == []


def _command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_missing_extra_is_one_line_of_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert "pip install 'muonshard[demo]'" in capsys.readouterr().err
