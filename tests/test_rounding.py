"""Stochastic rounding: to a neighbour, right on average, and the same whatever part of a tensor is looked at."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muonshard import rounding
from muonshard.rounding import draw_bits, make_key, round_into, round_up_by

CPU = torch.device("cpu")
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def neighbours(value: float) -> tuple[float, float]:
    """The bfloat16 numbers next to a float32: towards zero (its first 16 bits), and the one after that."""
    bits = torch.tensor(value).view(torch.int32) & -(1 << 16)
    return float(bits.view(torch.float32)), float((bits + (1 << 16)).view(torch.float32))


@given(value=floats, bits=st.integers(0, (1 << 16) - 1))
def test_a_number_becomes_one_of_its_neighbours(value: float, bits: int) -> None:
    low, high = neighbours(value)
    rounded = round_up_by(torch.tensor([value]), torch.tensor([bits]))
    assert rounded.dtype == torch.bfloat16
    assert float(rounded) in ((low,) if low == value else (low, high))


@given(value=floats)
def test_of_all_bits_as_many_round_up_as_the_number_is_above(value: float) -> None:
    """The mean over all 2^16 draws is the number itself."""
    low, high = neighbours(value)
    if math.isinf(high):
        return
    rounded = round_up_by(torch.full((1 << 16,), value), torch.arange(1 << 16))
    up = int((rounded.double() == high).sum()) if high != low else 0
    assert up == (0 if low == value else round((value - low) / (high - low) * (1 << 16)))


def test_what_is_not_finite_stays_what_it_is() -> None:
    least_nan = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([math.inf, -math.inf, math.nan]), least_nan])
    for bits in (0, (1 << 16) - 1):
        rounded = round_up_by(values, torch.full((5,), bits)).tolist()
        assert rounded[:2] == [math.inf, -math.inf]
        assert all(map(math.isnan, rounded[2:]))


shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)


@given(shape=shapes, key=st.integers(0, (1 << 64) - 1), data=st.data())
def test_an_element_gets_the_same_bits_in_any_box(shape: tuple[int, ...], key: int, data: st.DataObject) -> None:
    whole = draw_bits(key, (0,) * len(shape), shape, shape, CPU)
    spans = [
        data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda s: s[0] < s[1])) for n in shape
    ]
    origin, extent = tuple(a for a, _ in spans), tuple(b - a for a, b in spans)
    assert torch.equal(draw_bits(key, origin, extent, shape, CPU), whole[tuple(slice(a, b) for a, b in spans)])


def test_bits_are_those_of_splitmix64() -> None:
    """In Python's own integers, from the paper's text."""
    key, mask, numbers = make_key(1, 2, "weight"), (1 << 64) - 1, []
    state = key
    for _ in range(6):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        numbers.append((z ^ (z >> 31)) >> 48)
    assert draw_bits(key, (0, 0), (2, 3), (2, 3), CPU).flatten().tolist() == numbers


def test_bits_are_spread_evenly_and_do_not_repeat_from_row_to_row_or_step_to_step() -> None:
    draws = [draw_bits(make_key(0, step, "w"), (0, 0), (256, 256), (256, 256), CPU).double() for step in range(2)]
    for values in (draws[0], draws[1]):
        # of 65536 draws, the mean has a standard deviation of 2^16 / sqrt(12) / 256 = 74, the count of a bit one of 128
        assert abs(float(values.mean()) - (2**16 - 1) / 2) < 5 * 74
        for place in range(16):
            assert abs(int((values.long() >> place & 1).sum()) - 2**15) < 5 * 128
    for one, other in [(draws[0], draws[1]), (draws[0][:-1], draws[0][1:]), (draws[0][:, :-1], draws[0][:, 1:])]:
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(float(correlation)) < 5 / 256


@pytest.mark.parametrize(("seed", "step", "name"), [(1, 0, "w"), (0, 1, "w"), (0, 0, "v")])
def test_seed_step_and_name_each_change_the_bits(seed: int, step: int, name: str) -> None:
    assert make_key(seed, step, name) != make_key(0, 0, "w")


def rounded(value: Tensor, key: int) -> Tensor:
    target = torch.empty(value.shape, dtype=torch.bfloat16)
    round_into(target, value, key, (0,) * value.dim(), tuple(value.shape))
    return target


@pytest.mark.parametrize("shape", [(), (0, 3), (40,), (3, 50), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], chunk: int) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = round_up_by(value, draw_bits(7, (0,) * len(shape), shape, shape, CPU))
    monkeypatch.setattr(rounding, "CHUNK_NUMEL", chunk)
    assert torch.equal(rounded(value, 7), expected)
    wide = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    target = torch.zeros(6, 50, dtype=torch.bfloat16)[::2]
    round_into(target, wide, 7, (0, 0), (3, 50))
    assert torch.equal(target, rounded(wide, 7))


def test_small_steps_add_up_where_rounding_to_nearest_loses_them() -> None:
    """A thousand times a hundredth of a unit in the last place."""
    weights = nearest = torch.ones(4096, dtype=torch.bfloat16)
    unit = 2.0**-7
    for step in range(1000):
        weights = rounded(weights.float() + unit / 100, make_key(0, step, "w"))
        nearest = (nearest.float() + unit / 100).bfloat16()
    assert torch.equal(nearest, torch.ones(4096, dtype=torch.bfloat16))
    # each ends at 1 + 10 units, give or take sqrt(1000 x 0.01 x 0.99) = 3.1 units: their mean, a 64th of that
    assert abs(float(weights.double().mean()) - (1 + 10 * unit)) < 5 * 3.15 / 64 * unit
