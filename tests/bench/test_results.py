"""The shape of rows, whoever measured them."""

import math

import pytest

from aotpack.bench.protocol import Timing, in_turn
from aotpack.bench.results import Result, against


def test_a_ratio_is_over_our_own_row():
    rows = against("us", {"us": Timing.of([2.0, 1.0, 3.0]), "them": Timing.of([5.0])})
    assert [row.to_dict() for row in rows] == [
        {"what": "us", "value": 2.0, "unit": "s", "ratio": 1.0},
        {"what": "them", "value": 5.0, "unit": "s", "ratio": 2.5},
    ]
    assert rows[0].spread == (1.0, 3.0)


def test_a_rival_that_refused_has_a_row_that_says_so():
    row = against("us", {"us": Timing.of([2.0]), "them": "RuntimeError: not here"}, "MB")[1]
    assert row.to_dict() == {
        "what": "them: RuntimeError: not here",
        "value": None,
        "unit": "MB",
        "ratio": None,
    }


def test_a_result_is_rows_and_facts():
    rows = tuple(against("us", {"us": Timing.of([2.0, 4.0])}))
    result = Result(name="step", measured="seconds", rows=rows, facts={"torch": "2.14.1"})
    assert result.schema == "aotpack.bench.step/1"
    assert result.to_dict() == {
        "rows": [{"what": "us", "value": 3.0, "unit": "s", "ratio": 1.0}],
        "measured": "seconds",
        "facts": {"torch": "2.14.1"},
        "spread": {"us": [2.0, 4.0]},
    }


def test_rivals_take_turns():
    order = []
    times = in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, warmups=1, repeat=2)
    assert order == ["a", "b"] * 3
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize(("values", "median"), [([1.0], 1.0), ([3.0, 1.0], 2.0), ([9.0, 1.0, 2.0], 2.0)])
def test_a_timing_is_a_median_with_its_spread(values, median):
    timing = Timing.of(values)
    assert math.isclose(timing.median, median)
    assert (timing.low, timing.high) == (min(values), max(values))
