"""What the operator's benchmark makes of its samples."""

import pytest

from tools.bench.operator_parts.scale import Curve


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        ([(0, 0), (1, 0), (2, 100), (3, 200), (4, 950), (5, 1000)], 425),
        ([(0, 0), (1, 5), (2, 5), (3, 10)], 10 / 3),
        ([(0, 0), (2, 10)], 5),
    ],
    ids=["between the first and the last tenth", "few pods, between two looks", "all at once"],
)
def test_pods_a_second_are_never_none_where_there_were_pods(points, rate):
    assert Curve(points).rate() == pytest.approx(rate)
