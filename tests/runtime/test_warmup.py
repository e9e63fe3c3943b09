"""The first call of each program, with the smallest shapes that its bounds take."""

from __future__ import annotations

import pytest

from aotpack.build.specialisations import ATTENTION, exact
from aotpack.package import Package
from aotpack.runtime.programs import CompiledPrograms
from aotpack.runtime.shapes import Sizes, fits
from aotpack.runtime.warmup import call_once, smallest
from aotpack.store import Store
from tests.conftest import MASKS

BOUNDS = {kind.name: dict(kind.bounds) for kind in (*ATTENTION, exact(4, 7 * 16, 1612))}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_the_smallest_shape_fits_and_is_made_of_whole_blocks(name, block_size):
    batch, query, key = smallest(BOUNDS[name], block_size)
    assert fits(BOUNDS[name], Sizes(batch, query, key, batch * key * 4096))
    assert query % block_size == 0 or name.startswith("b4.")
    assert key > query


@pytest.mark.parametrize("name", MASKS)
def test_every_family_is_called_with_inputs_that_its_programs_take(masks_package, masks_pack, name):
    attend = masks_pack.attention(name)
    with Package.open(masks_package) as package:
        (variant,) = (v for v in package.manifest.variants if v.spec == attend.spec.digest)
        programs = CompiledPrograms(variant, Store().unpack(package, variant), attend.device)
    for kind in programs.kinds:
        call_once(attend, programs, kind)
    assert [kind.bounds for kind in programs.kinds] == [{}]
