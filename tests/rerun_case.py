"""Runs a case of test_every_layout.py again: `python tests/rerun_case.py 'Case(...)'`, as a failure printed it."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent))

from layout_cases import WORLD, Case, Mesh, Param, mismatches, run_cases
from pool import Pool


def main() -> None:
    """Print what is not as it should be."""
    names = {"Case": Case, "Mesh": Mesh, "Param": Param, "torch": torch, "inf": math.inf, "nan": math.nan}
    case = eval(sys.argv[1], names)
    torch.set_num_threads(1)
    pool = Pool(WORLD)
    results = [by_case[0] for by_case in pool.run(WORLD, run_cases, [case])]
    pool.close()
    print("\n".join(mismatches(case, results)) or "all is well")


if __name__ == "__main__":
    main()
