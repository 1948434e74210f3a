"""The Triton kernel, where Triton is installed: run by its interpreter, on the CPU, it gives torch's products."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("symmetric_kernel_cases.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_gives_torchs_symmetric_products_whole_from_one_triangle() -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, str(CASES)], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "32 cases\n"
