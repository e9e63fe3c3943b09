"""The self-test finds every way in which results can be wrong."""

import math

import pytest
import torch
from safetensors.torch import load as parse
from safetensors.torch import save

from aotpack.errors import InputError, NoVariantError
from aotpack.package import Package
from aotpack.runtime.selftest import self_test
from tests.conftest import MASKS
from tests.process import rewritten


@pytest.fixture
def vectors(dflash_package):
    with Package.open(dflash_package) as package:
        return parse(package.read_blob(package.manifest.variants[0].vectors))


def errors(report):
    return {check.what: check.error for check in report.checks}


def test_a_good_package_passes(dflash_package):
    report = self_test(dflash_package)
    assert report.passed
    assert (report.device, report.target[:4]) == ("cpu", "cpu-")
    assert errors(report)["empty rows"] == errors(report)["all rows empty"] == 0.0


def test_every_mask_family_is_tested(masks_package):
    report = self_test(masks_package)
    assert report.passed
    assert {check.spec for check in report.checks} == set(MASKS)


@pytest.mark.parametrize("name", ["out", "lse", "grad.q", "grad.k", "grad.v"])
def test_one_wrong_result_is_found(name, dflash_package, vectors, tmp_path):
    vectors[name] = vectors[name] * 1.1
    report = self_test(rewritten(dflash_package, tmp_path / "x.aotpack", vectors=save(vectors)))
    assert [check.what for check in report.checks if not check.passed] == [name]
    assert errors(report)[name] == pytest.approx(0.1 / 1.1, rel=0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_should_not_be_finite_is_found(value, dflash_package, vectors, tmp_path):
    vectors["out"][0, 0, 0, 0] = value
    report = self_test(rewritten(dflash_package, tmp_path / "x.aotpack", vectors=save(vectors)))
    assert [check.what for check in report.checks if not check.passed] == ["out"]


def test_a_row_that_should_be_empty_is_found(dflash_package, vectors, tmp_path):
    vectors["mask.keep"] = torch.ones_like(vectors["mask.keep"])
    report = self_test(rewritten(dflash_package, tmp_path / "x.aotpack", vectors=save(vectors)))
    assert errors(report)["empty rows"] == math.inf
    assert not report.passed


def test_a_device_without_a_variant_is_refused(dflash_package):
    with pytest.raises((NoVariantError, InputError)):
        self_test(dflash_package, "cuda")


def test_what_passed_is_remembered_and_a_changed_note_is_not_trusted(dflash_package, tmp_path, monkeypatch):
    monkeypatch.setenv("AOTPACK_CACHE", str(tmp_path))
    first = self_test(dflash_package, remember=True)
    again = self_test(dflash_package, remember=True)
    assert (first.remembered, again.remembered) == (False, True)
    assert again.checks == first.checks
    assert not self_test(dflash_package).remembered
    (note,) = (tmp_path / "selftests").iterdir()
    note.write_text(note.read_text().replace('"target"', '"another"'))
    assert not self_test(dflash_package, remember=True).remembered


def test_what_failed_is_tested_again(dflash_package, tmp_path, monkeypatch):
    monkeypatch.setenv("AOTPACK_CACHE", str(tmp_path))
    strict = rewritten(dflash_package, tmp_path / "strict.aotpack", tolerance=1e-12)
    for _ in range(2):
        report = self_test(strict, remember=True)
        assert (report.passed, report.remembered) == (False, False)
