"""The norm and the dtype of the iteration: what each choice changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from muonshard.orthogonalize import NewtonSchulz, devices, polar_express
from muonshard.orthogonalize.devices import iteration_dtype

CPU = torch.device("cpu")


def normalized(matrix: Tensor, normalize: str) -> Tensor:
    """What the steps start from: without any, the matrix is only normalised."""
    return NewtonSchulz((), dtype=torch.float32, normalize=normalize)(matrix[None])[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(64, 256), (70, 33), (5, 5)], ids=str)
def test_the_schatten4_norm_is_between_the_largest_singular_value_and_frobeniuss(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.svdvals(matrix.double())
    expected = exact / (exact**4).sum() ** 0.25
    start = torch.linalg.svdvals(normalized(matrix, "schatten4").double())
    assert torch.allclose(start, expected, rtol=1e-5, atol=1e-6)
    assert (start > torch.linalg.svdvals(normalized(matrix, "frobenius").double())).all()
    assert start.max() <= 1


def test_from_the_schatten4_norm_small_singular_values_start_larger_and_arrive_nearer() -> None:
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(256, 256, generator=generator)).Q for _ in range(2))
    matrix, polar = u * torch.logspace(0, -3, 256) @ v, u @ v
    medians, errors = [], []
    for normalize in ("frobenius", "schatten4"):
        medians.append(float(torch.linalg.svdvals(normalized(matrix, normalize)).median()))
        form = NewtonSchulz(polar_express(5), dtype=torch.float32, normalize=normalize)  # type: ignore[arg-type]
        errors.append(float((form(matrix[None])[0] - polar).norm() / polar.norm()))
    assert medians[1] > 2 * medians[0]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_schatten4_norm_does_not_depend_on_the_matrixs_scale(scale: float) -> None:
    matrix = torch.randn(16, 40, generator=torch.Generator().manual_seed(0))
    form = NewtonSchulz(dtype=torch.float32, eps=1e-20, normalize="schatten4")
    assert torch.allclose(form(scale * matrix[None]), form(matrix[None]), atol=1e-4)
    assert torch.equal(form(torch.zeros(1, 16, 40)), torch.zeros(1, 16, 40))


@pytest.mark.parametrize(("multiplies", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_iterates_in_bfloat16_where_it_multiplies_it_else_in_float32(
    multiplies: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "cpu_multiplies_bfloat16", lambda: multiplies)
    assert iteration_dtype(CPU) == dtype
    stack = torch.randn(1, 8, 24, generator=torch.Generator().manual_seed(0)).half()
    result = NewtonSchulz()(stack)
    assert result.dtype == torch.float16  # what comes in goes out, but is not iterated in
    assert torch.equal(result, NewtonSchulz(dtype=dtype)(stack))


@pytest.mark.parametrize(("supported", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_gpu_iterates_in_bfloat16_where_its_hardware_has_it(
    supported: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported or including_emulation)
    assert iteration_dtype(torch.device("cuda")) == dtype


def test_float16_is_refused_as_a_dtype_to_iterate_in() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch\.float16 is not one to iterate in"):
        NewtonSchulz(dtype=torch.float16)
