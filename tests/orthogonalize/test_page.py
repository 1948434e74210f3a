"""What the page about the orthogonaliser shows is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks import coefficients
from muonshard.orthogonalize import JORDAN, NewtonSchulz
from muonshard.orthogonalize.coefficients import image, polar_express
from muonshard.orthogonalize.restarts import PAYS_FROM, restarts

PAGE = (Path(__file__).parents[2] / "docs" / "orthogonalize.md").read_text()


def test_the_pages_table_of_coefficients_is_what_the_script_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["coefficients"])
    coefficients.main()
    (shown,) = re.findall(r"<!-- coefficients.*?-->\n(.*?)<!-- end -->", PAGE, flags=re.DOTALL)
    assert shown == capsys.readouterr().out


def test_five_steps_map_the_interval_to_where_it_is_known_to_go() -> None:
    assert image((JORDAN,) * 5, 1e-3, 1.0) == pytest.approx((0.47, 1.20), abs=5e-3)
    assert image(polar_express(5), 1e-3, 1.0) == pytest.approx((0.85, 1.12), abs=5e-3)


def test_the_pages_policy_and_flops_are_the_codes() -> None:
    m, n, standard = 512, 2048, 5 * (4 * 512 * 512 * 2048 + 2 * 512**3)
    for dtype, chosen in ((torch.bfloat16, (2, 4)), (torch.float32, (3,))):
        name, segments = str(dtype).removeprefix("torch."), len(chosen) + 1
        rows, columns = PAYS_FROM[dtype]
        assert restarts(m, n, (JORDAN,) * 5, dtype) == chosen
        assert re.search(
            rf"^\| {name}[^|]*\| {rows}, {columns:g} \| {segments} \| {' and '.join(map(str, chosen))} ", PAGE, re.M
        )
        plain, executed = (NewtonSchulz(dtype=dtype).flops(m, n, device) / standard for device in ("meta", "cpu"))
        assert re.search(rf"^\| {name} \| {segments} \| .* = {plain:.2f} \| .* \| {executed:.2f} \|$", PAGE, re.M)
