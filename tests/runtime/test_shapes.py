"""Which specialisation a call takes: the bounds that a manifest records, and sizes at and past them."""

from __future__ import annotations

import pytest

from aotpack.runtime.shapes import Sizes, fits

INT32 = (1 << 31) - 1


@pytest.mark.parametrize(
    ("bounds", "sizes", "expected"),
    [
        ({}, Sizes(1 << 40, 1 << 40, 1 << 40, 1 << 60), True),
        ({"max_batch": 8}, Sizes(8, 1, 1, 1), True),
        ({"max_batch": 8}, Sizes(9, 1, 1, 1), False),
        ({"max_length": 4096}, Sizes(1, 4096, 4096, 1), True),
        ({"max_length": 4096}, Sizes(1, 4097, 1, 1), False),
        ({"max_length": 4096}, Sizes(1, 1, 4097, 1), False),
        ({"max_elements": INT32}, Sizes(1, 1, 1, INT32), True),
        ({"max_elements": INT32}, Sizes(1, 1, 1, INT32 + 1), False),
        ({"divisor": 128}, Sizes(1, 128, 384, 1), True),
        ({"divisor": 128}, Sizes(1, 128, 385, 1), False),
        ({"divisor": 128}, Sizes(1, 100, 384, 1), False),
        ({"batch": 1, "query": 8192, "key": 12288}, Sizes(1, 8192, 12288, 1), True),
        ({"batch": 1, "query": 8192, "key": 12288}, Sizes(2, 8192, 12288, 1), False),
        ({"batch": 1, "query": 8192, "key": 12288}, Sizes(1, 8191, 12288, 1), False),
        ({"batch": 1, "query": 8192, "key": 12288}, Sizes(1, 8192, 12289, 1), False),
        ({"max_batch": 8, "divisor": 128}, Sizes(9, 128, 128, 1), False),
        ({"of a later release": 1}, Sizes(1, 1, 1, 1), False),
    ],
)
def test_a_program_takes_what_all_its_bounds_allow(
    bounds: dict[str, int], sizes: Sizes, expected: bool
) -> None:
    assert fits(bounds, sizes) is expected
