"""The demo, small: it runs, tells the truth, and ends when a process does or when it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from muonshard import cli
from muonshard.demo import runs, table, train_gpt
from muonshard.demo.launch import RunError, launch
from muonshard.demo.picture import draw
from muonshard.demo.runs import Run, first_at


def _run(optimizer: str, losses: tuple[float, ...]) -> Run:
    steps = tuple(20.0 * i for i in range(len(losses)))
    return Run(optimizer, steps, tuple(s / 2 for s in steps), losses, (3.0, 1.0, 2.0), 3_000_000, "def f(): pass")


def test_the_step_at_which_a_loss_is_reached_lies_between_the_points_around_it() -> None:
    assert first_at((0.0, 10.0, 20.0), (5.0, 3.0, 1.0), 2.0) == 15.0
    assert first_at((0.0, 10.0), (5.0, 3.0), 5.0) == 0.0
    assert first_at((0.0, 10.0), (5.0, 3.0), 1.0) is None


def test_the_table_and_the_verdict_say_by_how_many_steps_muon_was_faster_or_that_it_was_not() -> None:
    adamw, muon = _run("adamw", (5.0, 3.0, 2.0)), _run("muon", (5.0, 2.0, 1.5))
    assert "after 20 of 40 steps (2.00x fewer) and 10 of 20 seconds" in table.verdict([adamw, muon])
    assert "did not reach" in table.verdict([muon, adamw])
    assert ("steps to adamw's last loss", "40", "20") in table.rows([adamw, muon])
    assert ("steps to muon's last loss", "40", "never") in table.rows([muon, adamw])
    assert ("optimizer, ms per step (median)", "2.0", "2.0") in table.rows([adamw, muon])


@pytest.mark.parametrize("last", [1.5, 2.5], ids=["muon wins", "muon loses"])
def test_the_picture_is_written_whoever_wins(tmp_path: Path, last: float) -> None:
    draw([_run("adamw", (5.0, 3.0, 2.0)), _run("muon", (5.0, 2.8, last))], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_attention_sees_positions_only_by_their_distance() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(1, 1, 1, 64).expand(1, 1, 12, 64) for _ in range(2))
    scores = (train_gpt.rotate(query) @ train_gpt.rotate(key).mT)[0, 0]
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0].unique().numel() > 1


def test_the_model_predicts_a_byte_from_those_before_it_alone() -> None:
    torch.manual_seed(0)
    model = train_gpt.GPT()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    tokens = torch.randint(256, (2, 20))
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])
    expected = F.nll_loss(before.log_softmax(-1)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]), expected)


def test_no_held_out_file_is_trained_on() -> None:
    training, held_out = train_gpt.load_text()
    assert 0.02 < len(held_out) / len(training) < 0.1
    middle = bytes(held_out[len(held_out) // 2 :][:2000].tolist())
    assert middle in bytes(held_out.tolist())
    assert middle not in bytes(training.tolist())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a short demo on 4 processes printed, and its folder."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "muonshard.cli", "demo", "--steps=3", f"--out={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


def test_the_demo_trains_both_ways_and_ends_with_a_picture_a_table_and_a_sample(demo: tuple[str, Path]) -> None:
    printed, folder = demo
    assert (folder / "loss.png").exists()
    assert "validation loss at the end" in printed
    assert "what the muon model writes" in printed
    adamw, muon = runs.load(folder / "adamw.json"), runs.load(folder / "muon.json")
    assert adamw.losses[-1] < adamw.losses[0] == muon.losses[0] > muon.losses[-1]
    assert adamw.steps == muon.steps == (0, 1, 2, 3)
    assert muon.sample.startswith("def ")


def test_the_demo_says_what_the_plan_says_is_sent(demo: tuple[str, Path]) -> None:
    printed, folder = demo
    matrices = sum(p.numel() for name, p in train_gpt.GPT().named_parameters() if "blocks" in name and p.ndim == 2)
    sent = runs.load(folder / "muon.json").bytes_sent
    payload = 2 * 2 * matrices / 4 * (1 - 1 / 2) + 2 * matrices / 2 * (1 - 1 / 2)  # 2 replicas of 2 shards, bfloat16
    flags = 2 * (6 + 6 + 12)  # one for each piece: of 24 matrices, 6 go to the other shard, 6 come, 12 cross replicas
    assert sent == payload + flags
    assert f"{sent / 1e6:.2f} MB" in printed
    assert runs.load(folder / "adamw.json").bytes_sent == 0


def test_without_a_terminal_progress_is_lines(demo: tuple[str, Path]) -> None:
    for name in ("adamw", "muon"):
        (line,) = [line for line in demo[0].splitlines() if line.startswith(f"{name} step 3/3")]
        assert "loss" in line
        assert "tokens/s" in line
        assert "of the step" in line


def test_any_number_of_processes_trains_on_the_same_batches(demo: tuple[str, Path], tmp_path: Path) -> None:
    four = runs.load(demo[1] / "muon.json")
    one = runs.run("muon", 3, 1, tmp_path)
    assert one.losses == pytest.approx(four.losses, rel=5e-3)


BROKEN = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("rank 1 gives up")
dist.barrier()
"""


def test_a_process_that_fails_ends_the_demo_with_its_error_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    monkeypatch.setattr(runs, "SCRIPT", script)
    assert cli.main(["demo", "--processes=2", "--steps=1", f"--out={tmp_path}"]) == 1
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1
    assert said.rstrip().endswith("ValueError: rank 1 gives up\nrank 1 ended with exit code 1")
    assert _alive(str(script)) == []


def test_a_process_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, time\nos.environ['RANK'] == '1' and os.kill(os.getpid(), 9)\ntime.sleep(60)\n"
    )
    with pytest.raises(RunError, match="rank 1 ended with exit code -9"):
        launch([sys.executable, str(script)], 3)
    assert _alive(str(script)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_demo_that_is_told_to_stop_leaves_no_processes(tmp_path: Path, number: signal.Signals) -> None:
    script, ready = tmp_path / "endless.py", tmp_path / "ready"
    os.mkfifo(ready)
    script.write_text(f"import time\nopen({str(ready)!r}, 'w').write('x')\ntime.sleep(600)\n")
    code = (
        "import signal, sys; from pathlib import Path; from muonshard import cli; from muonshard.demo import runs\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"runs.SCRIPT = Path({str(script)!r})\n"
        f"sys.exit(cli.main(['demo', '--processes=2', '--steps=1', '--out={tmp_path}']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        ready.read_text()
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped" in said
    assert "Traceback" not in said
    assert _alive(str(script)) == []


def _alive(script: str) -> list[str]:
    """Processes whose command line holds the script."""
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and script in _command_of(pid)]


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
    assert capsys.readouterr().err == "the demo needs rich and matplotlib: pip install 'muonshard[demo]'\n"


@pytest.mark.parametrize("option", ["--steps=0", "--processes=-1"])
def test_a_number_that_is_not_positive_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["demo", option])
    assert "must be at least 1" in capsys.readouterr().err
