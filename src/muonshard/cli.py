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
    demo.add_argument("--steps", type=int, default=240, help="steps of each run (default: 240)")
    demo.add_argument("--processes", type=int, default=4, help="local processes (default: 4)")
    demo.set_defaults(command=_demo)
    return parser


def _demo(options: argparse.Namespace) -> int:
    missing = [name for name in ("rich", "matplotlib") if find_spec(name) is None]
    if missing:
        print(f"the demo needs {' and '.join(missing)}: pip install 'muonshard[demo]'", file=sys.stderr)
        return 2
    from muonshard.demo import picture, runs, table

    options.out.mkdir(parents=True, exist_ok=True)
    try:
        told = [runs.run(name, options.steps, options.processes, options.out) for name in ("adamw", "muon")]
    except runs.RunFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    picture.draw(told, options.out / "loss.png")
    table.show(told)
    print(f"the picture is {options.out / 'loss.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
