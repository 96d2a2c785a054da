"""The percentile of the benches is a value that was measured, at the nearest rank."""

from __future__ import annotations

import pytest

from ops.percentile import nearest_rank


@pytest.mark.parametrize(
    ("values", "share", "value"),
    [
        ((5, 3, 1, 2, 4), 0.5, 3),  # rank 2.5 is the third: rounding half to even would say the second
        ((1, 2, 3, 4, 5, 6, 7), 0.2, 2),  # rank 1.4
        ((6, 5, 4, 3, 2, 1), 0.5, 3),
        ((4, 3, 2, 1), 0.55, 3),  # rank 2.2
        (tuple(range(1, 201)), 0.99, 198),
        (tuple(range(1, 52)), 0.99, 51),
        ((7,), 0.0, 7),
        ((7,), 1.0, 7),
    ],
)
def test_the_rank_is_rounded_up(values: tuple[int, ...], share: float, value: int) -> None:
    assert nearest_rank(values, share) == value
