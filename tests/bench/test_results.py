"""The shape of rows, whoever measured them."""

import math

import pytest

from aotpack.bench.protocol import Timing
from aotpack.bench.results import Result, against


def test_a_ratio_is_over_our_own_row():
    rows = against("step", {"aotpack": Timing.of([2.0, 1.0, 3.0]), "them": Timing.of([5.0])})
    assert [row.to_dict() for row in rows] == [
        {
            "what": "step, aotpack",
            "value": 2.0,
            "unit": "s",
            "ratio": 1.0,
            "group": "step",
            "who": "aotpack",
            "spread": [1.5, 2.5],
            "count": 3,
        },
        {
            "what": "step, them",
            "value": 5.0,
            "unit": "s",
            "ratio": 2.5,
            "group": "step",
            "who": "them",
            "spread": [5.0, 5.0],
            "count": 1,
        },
    ]
    assert [row.own for row in rows] == [True, False]


def test_a_rival_that_refused_has_a_row_that_says_so():
    row = against("peak", {"aotpack": Timing.of([2.0]), "them": "RuntimeError: not here"}, "MB")[1]
    assert row.refused == "RuntimeError: not here"
    assert row.to_dict() == {
        "what": "peak, them: RuntimeError: not here",
        "value": None,
        "unit": "MB",
        "ratio": None,
        "group": "peak",
        "who": "them",
        "spread": None,
        "count": 0,
    }


def test_without_our_own_row_there_is_no_ratio():
    (row,) = against("step", {"them": Timing.of([5.0])})
    assert (row.value, row.ratio) == (5.0, None)


def test_a_row_without_a_group_is_named_after_who():
    (row,) = against("", {"aotpack, warm": Timing.of([5.0])}, own="aotpack, warm")
    assert (row.what, row.own, row.ratio) == ("aotpack, warm", True, 1.0)


def test_a_result_is_rows_and_facts():
    rows = tuple(against("", {"aotpack": Timing.of([2.0, 4.0])}))
    result = Result(name="step", measured="seconds", rows=rows, facts={"torch": "2.14.1"})
    assert result.schema == "aotpack.bench.step/1"
    assert result.to_dict() == {
        "rows": [rows[0].to_dict()],
        "measured": "seconds",
        "facts": {"torch": "2.14.1"},
    }


@pytest.mark.parametrize(
    ("values", "median", "low", "high"),
    [
        ([1.0], 1.0, 1.0, 1.0),
        ([3.0, 1.0], 2.0, 1.0, 3.0),
        ([9.0, 1.0, 2.0], 2.0, 1.5, 5.5),
        ([5.0, 1.0, 2.0, 4.0, 3.0], 3.0, 2.0, 4.0),
    ],
)
def test_a_timing_is_a_median_with_its_quartiles(values, median, low, high):
    timing = Timing.of(values)
    assert math.isclose(timing.median, median)
    assert (timing.low, timing.high, timing.count) == (low, high, len(values))
