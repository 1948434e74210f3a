"""What the device at hand computes fast: the one place that asks torch about it."""

from __future__ import annotations

import functools
import importlib.util

import torch

# Probes that torch keeps private; one that a version of torch lacks counts as "no".
_CPU_PROBES = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


def iteration_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where `device` multiplies it in hardware, float32 elsewhere.

    Never float16 on a CPU, where it is emulated and about ten times slower than float32.
    """
    if device.type == "cpu":
        return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if device.type == "xpu" else torch.float32


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has AVX512-BF16 or AMX, and this torch the oneDNN kernels that use them."""
    return torch.backends.mkldnn.is_available() and any(getattr(torch.cpu, name, _no)() for name in _CPU_PROBES)


def why_no_triton(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`, or None where they can. Does not import Triton."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.hip is not None or not torch.cuda.is_available():
        return "there is no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "its compute capability is below 8.0, Ampere's"
    return None


def _no() -> bool:
    return False
