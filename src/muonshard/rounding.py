"""Stochastic rounding from float32 to bfloat16, with random bits that depend on the element and on nothing else.

A weight that moves by less than half a unit in its last place never moves if it is rounded to nearest; rounded up with
the probability of what is cut off, it moves by the right amount on average (Gupta et al. 2015, arXiv 1502.02551). The
bits are a function of a key and the element's place in the whole tensor, so every mesh and every replica draws the
same.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

CUT_BITS = 16
"""What float32 has more than bfloat16."""

CHUNK_NUMEL = 1 << 20
"""Elements rounded at once: what is drawn for them takes several times their memory."""

INCREMENT, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"."""


def make_key(seed: int, step: int, name: str) -> int:
    """The key of one parameter in one step: 64 bits."""
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def round_into(target: Tensor, wide: Tensor, key: int, origin: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Put `wide` (float32) into `target` (bfloat16), rounded at random.

    They are a box of a tensor of `shape`, whose first element is at `origin` there.
    """
    if target.numel() == 0:
        return
    if target.dim() == 0:
        target, wide, origin, shape = target.view(1), wide.view(1), (0,), (1,)
    dim = max(range(target.dim()), key=lambda d: target.shape[d])
    step = max(1, CHUNK_NUMEL * target.shape[dim] // target.numel())
    for start in range(0, target.shape[dim], step):
        length = min(step, target.shape[dim] - start)
        part = wide.narrow(dim, start, length)
        place = tuple(first + start * (d == dim) for d, first in enumerate(origin))
        bits = draw_bits(key, place, tuple(part.shape), shape, part.device)
        target.narrow(dim, start, length).copy_(round_up_by(part, bits))


def round_up_by(wide: Tensor, bits: Tensor) -> Tensor:
    """float32 to bfloat16: the neighbour away from zero where `bits` and what is cut off carry over, else the other.

    `bits` are integers in [0, 2^16); infinities and NaN stay what they are.
    """
    raised = wide.contiguous().view(torch.int32) + bits.to(torch.int32)
    cut = (raised & -(1 << CUT_BITS)).view(torch.float32).to(torch.bfloat16)
    return torch.where(wide.isfinite(), cut, wide.to(torch.bfloat16))


def draw_bits(
    key: int, origin: tuple[int, ...], extent: tuple[int, ...], shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """16 random bits (int64) for each element of a box of `extent` at `origin` in a tensor of `shape`.

    Element i, in row-major order of the tensor, gets the first bits of number i of the SplitMix64 stream from `key`.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    for first, length, size in zip(origin, extent, shape, strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(first, first + length, device=device)
    mixed = index * _signed(INCREMENT) + _signed(key + INCREMENT)
    mixed = (mixed ^ _shift(mixed, 30)) * _signed(FIRST_FACTOR)
    mixed = (mixed ^ _shift(mixed, 27)) * _signed(SECOND_FACTOR)
    return _shift(mixed ^ _shift(mixed, 31), 64 - CUT_BITS)


def _signed(value: int) -> int:
    """The same 64 bits as a signed integer."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift(value: Tensor, places: int) -> Tensor:
    """To the right, with zeros from the left: torch's shift repeats the sign."""
    return (value >> places) & ((1 << (64 - places)) - 1)
