"""Coefficients generated from the minimax problem, against those that were published."""

from __future__ import annotations

import pytest

from muonshard.orthogonalize.coefficients import polar_express

PUBLISHED = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
"""The list of coefficients in the code listing of Amsel et al. 2025, arXiv 2505.16932, before its safety factor."""
SAFETY = 1.01


@pytest.mark.parametrize("step", range(len(PUBLISHED)))
def test_each_step_is_the_published_one_with_its_safety_factor(step: int) -> None:
    a, b, c = PUBLISHED[step]
    expected = (a / SAFETY, b / SAFETY**3, c / SAFETY**5)
    assert tuple(polar_express(8)[step]) == pytest.approx(expected, rel=1e-5)
