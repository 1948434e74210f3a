"""The orthogonaliser by itself: `python -m benchmarks.orthogonalize`.

First, time and FLOPs for each shape: torch.optim.Muon's own function, our standard form, and the form that we choose,
run in turn on one thread. Times are the thread's CPU time, the least over rounds, which other processes disturb little.
Then errors against the same polynomial in float64, relative in the Frobenius norm, for spectra from easy to bad.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from muonshard.orthogonalize import JORDAN, Coefficients, NewtonSchulz, polar_express
from muonshard.orthogonalize.newton_schulz import Normalization

SHAPES = ((8, 8), (64, 64), (128, 512), (256, 1024), (512, 512), (512, 1024), (512, 2048), (1024, 3072))
STEPS = 5
STANDARD = tuple(range(1, STEPS))
VARIANTS: tuple[tuple[tuple[int, ...] | None, Normalization], ...] = (
    (STANDARD, "frobenius"),
    (None, "frobenius"),
    (None, "schatten4"),
)


def torch_muon(stack: Tensor) -> Tensor:
    """What `torch.optim.Muon` computes for each matrix, a call of torch's for each."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    return torch.stack([_zeropower_via_newtonschulz(matrix.clone(), JORDAN, STEPS, 1e-7) for matrix in stack])


def least_milliseconds(methods: Sequence[Callable[[Tensor], Tensor]], stack: Tensor, rounds: int) -> list[float]:
    """CPU milliseconds of one call of each method, the least over rounds in which they take turns."""
    times: list[list[float]] = [[] for _ in methods]
    for _ in range(rounds + 1):  # the first round warms up
        for method, seen in zip(methods, times, strict=True):
            start = time.thread_time()
            method(stack)
            seen.append(1e3 * (time.thread_time() - start))
    return [min(seen[1:]) for seen in times]


def spectra(m: int, n: int) -> dict[str, Tensor]:
    """Matrices `(m, n)` in float32, from easy singular values to bad; in the last, rounding does not average out."""
    generator = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(m, m, generator=generator, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(n, m, generator=generator, dtype=torch.float64)).Q
    values = {
        "flat": torch.ones(m),
        "condition 1e3": torch.logspace(0, -3, m),
        "condition 1e6": torch.logspace(0, -6, m),
        "rank-deficient": torch.cat([torch.ones(m // 4), torch.zeros(m - m // 4)]),
        "one huge": torch.cat([torch.full((1,), 1e3), torch.ones(m - 1)]),
    }
    matrices = {name: ((u * s.double()) @ v.T).float() for name, s in values.items()}
    matrices["random"] = torch.randn(m, n, generator=generator)
    blocks = torch.block_diag(*torch.randn(m // 8, 8, 8, generator=generator))
    matrices["block-diagonal"] = torch.cat([blocks, torch.zeros(m, n - m)], dim=1)
    return matrices


def error(form: NewtonSchulz, matrix: Tensor) -> float:
    """Relative distance to the same polynomial of the singular values in float64."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (s.norm() if form.normalize == "frobenius" else s.square().norm().sqrt())
    for a, b, c in form.coefficients:
        s = a * s + b * s**3 + c * s**5
    exact = u * s @ vt
    return float((form(matrix[None])[0].double() - exact).norm() / exact.norm())


def print_times(dtype: torch.dtype, rounds: int) -> None:
    standard, ours = NewtonSchulz(dtype=dtype, restart=STANDARD), NewtonSchulz(dtype=dtype)
    print(
        f"\n| {dtype} | matrices | torch.optim.Muon (bfloat16), ms | standard, ms | ours, ms | FLOPs executed | plain |"
    )
    print("|---|---|---|---|---|---|---|")
    for m, n in SHAPES:
        count = max(1, min(2000, (1 << 19) // (m * n)))
        stack = torch.randn(count, m, n, generator=torch.Generator().manual_seed(0))
        times = least_milliseconds([torch_muon, standard, ours], stack, rounds if m < 1024 else 2)
        executed, plain = (
            ours.flops(m, n, device) / (STEPS * (4 * m * m * n + 2 * m**3)) for device in ("cpu", "meta")
        )
        print(f"| ({m}, {n}) | {count} | {' | '.join(f'{t:.2f}' for t in times)} | {executed:.2f} | {plain:.2f} |")


def print_errors(m: int, n: int, dtype: torch.dtype) -> None:
    forms: list[tuple[str, tuple[Coefficients, ...]]] = [
        ("Jordan", (JORDAN,) * STEPS),
        ("Polar Express", polar_express(5)),
    ]
    print(
        f"\n| ({m}, {n}), {dtype}: error | {' | '.join(f'{name}, standard | ours | schatten4' for name, _ in forms)} |"
    )
    print("|---|" + "---|" * 3 * len(forms))
    for kind, matrix in spectra(m, n).items():
        cells = []
        for _, coefficients in forms:
            for restart, normalize in VARIANTS:
                form = NewtonSchulz(coefficients, dtype=dtype, restart=restart, normalize=normalize)
                cells.append(f"{error(form, matrix):.2g}")
        print(f"| {kind} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the iteration")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    print_times(dtype, arguments.rounds)
    print_errors(256, 1024, dtype)


if __name__ == "__main__":
    main()
