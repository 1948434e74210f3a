"""Fixtures shared by all tests: one pool of worker processes, and hypothesis profiles."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from muonshard.orthogonalize import newton_schulz
from pool import Pool

settings.register_profile(
    "ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("thorough", parent=settings.get_profile("ci"), derandomize=False, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)  # one process stands for one rank: the same kernels, the same bits


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes that form real gloo groups (see tests/pool.py)."""
    workers = Pool(size=8)
    yield workers
    workers.close()


@pytest.fixture
def iterates_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch iterates in bfloat16 everywhere; we do where the hardware multiplies it, and then bits are equal."""
    monkeypatch.setattr(newton_schulz, "iteration_dtype", lambda device: torch.bfloat16)
