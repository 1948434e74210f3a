"""The command line: `muonshard demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    options = _parser().parse_args(arguments)
    return int(options.command(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="muonshard", description="Muon for parameters that no single rank holds.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train a small language model with AdamW and with Muon, and compare")
    demo.add_argument("--out", type=Path, default=Path("out"), help="folder for picture and figures (default: out)")
    demo.add_argument("--steps", type=_positive, help="steps of each run (default: about 5 minutes' on two cores)")
    demo.add_argument("--processes", type=_positive, default=4, help="local processes (default: 4)")
    demo.set_defaults(command=_demo)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _demo(options: argparse.Namespace) -> int:
    missing = [name for name in ("rich", "matplotlib") if find_spec(name) is None]
    if missing:
        print(f"the demo needs {' and '.join(missing)}: pip install 'muonshard[demo]'", file=sys.stderr)
        return 2
    from rich.console import Console

    from muonshard.demo import launch, picture, runs, table

    steps = options.steps or runs.usual_steps()
    print(f"A GPT on {options.processes} processes: {steps} steps with AdamW, then {steps} with Muon.", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        told = [runs.run(name, steps, options.processes, options.out) for name in ("adamw", "muon")]
    except launch.RunError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    finally:
        Console().show_cursor()  # a progress bar that was stopped has left it hidden
    picture.draw(told, options.out / "loss.png")
    table.show(told)
    print(f"the picture is {options.out / 'loss.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
