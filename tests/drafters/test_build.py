"""Published drafters are built and tested: the six that differ most here, all twenty when asked for."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from aotpack.build import build
from aotpack.build.absent import DEVICES
from aotpack.drafter import specs_from_config
from aotpack.errors import UnsupportedError
from aotpack.package import Package, Variant
from aotpack.runtime.selftest import SelfTestReport, self_test
from aotpack.spec import AttentionSpec, MaskSpec
from aotpack.targets import Target
from tests.drafters.facts import BY_NAME, DRAFTERS, Drafter

# 14 heads of 64; 56 heads in float16, and no head_dim in the config; keys of 192 and values of 128 with a
# scale of their own; blocks of 7 and a hidden size unlike heads * head_dim; heads of 256; another mask in
# another format.
SIX = (
    "qwen2.5-0.5b-dflash",
    "deepseek-v3-671b-eagle3",
    "torchspec-qwen3-8b-eagle3-mla",
    "kimi-k3-dspark",
    "qwen3.5-35b-a3b-eagle3",
    "speculators-qwen3-8b-dflash",
)
EVERY = pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter.name)


def specs_of(*names: str) -> dict[str, AttentionSpec]:
    """Specs as ``aotpack build NAME=SOURCE`` names them."""
    return {
        f"{name}.{mask}": spec
        for name in names
        for mask, spec in specs_from_config(BY_NAME[name].source).items()
    }


def package(folder: Path, name: str, specs: dict[str, AttentionSpec], target: str) -> Path:
    path = folder / f"{name}.aotpack"
    with FileLock(folder / f".{name}.lock"):
        if not path.exists():
            build(specs, [target], path)
    return path


@pytest.fixture(scope="session")
def six(built: Path) -> Path:
    return package(built, "drafters-six", specs_of(*SIX), "cpu")


@pytest.fixture(scope="session")
def twenty(built: Path) -> Path:
    return package(built, "drafters-twenty", specs_of(*BY_NAME), "cpu")


@pytest.fixture(scope="session")
def tested(twenty: Path) -> SelfTestReport:
    return self_test(twenty)


def test_the_six_that_differ_most_pass_the_self_test(six: Path) -> None:
    report = self_test(six)
    failed = [check for check in report.checks if not check.passed]
    assert failed == []
    assert {check.spec for check in report.checks} == set(specs_of(*SIX))


def keep(drafter: Drafter, target: str, row: dict[str, Any]) -> None:
    """Puts one row into the record that AOTPACK_DRAFTERS_RECORD names, if it names one."""
    place = os.environ.get("AOTPACK_DRAFTERS_RECORD")
    if not place:
        return
    path = Path(place)
    rows = json.loads(path.read_text())["drafters"] if path.exists() else {}
    rows.setdefault(drafter.name, {})[target] = row
    data = {
        "schema": "aotpack.drafters/1",
        "command": "AOTPACK_DRAFTERS_RECORD=artifacts/drafters.json pytest -m slow tests/drafters",
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "drafters": {d.name: rows[d.name] for d in DRAFTERS if d.name in rows},
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


@pytest.mark.slow
@pytest.mark.timeout(20000)
@EVERY
def test_all_twenty_pass_the_self_test_on_the_cpu(
    drafter: Drafter, twenty: Path, tested: SelfTestReport
) -> None:
    checks = [check for check in tested.checks if check.spec.rpartition(".")[0] == drafter.name]
    assert [check for check in checks if not check.passed] == []
    assert {check.spec for check in checks} == set(specs_of(drafter.name))
    row = {}
    with Package.open(twenty) as opened:
        variants = {variant.spec: variant for variant in opened.manifest.variants}
        for name, spec in specs_of(drafter.name).items():
            row[name.rpartition(".")[2]] = {
                "spec": spec.digest,
                "bytes": size_of(opened, variants[spec.digest]),
                "errors": {c.what: float(f"{c.error:.2e}") for c in checks if c.spec == name},
            }
    keep(drafter, tested.target, row)


@pytest.mark.slow
@pytest.mark.timeout(20000)
@EVERY
def test_all_twenty_build_for_hopper(drafter: Drafter, built: Path) -> None:
    row = {}
    for name, spec in specs_of(drafter.name).items():
        # Drafters of one attention share a package.
        path = package(built, f"drafter-{spec.digest[:16]}-sm90", {"attention": spec}, "cuda-sm90")
        with Package.open(path) as opened:
            (variant,) = opened.manifest.variants
            assert variant.requires.cuda is not None
            shared = max(kernel.shared_memory for kernel in variant.requires.cuda.kernels)
            assert shared <= DEVICES[(9, 0)].shared_memory
            row[name.rpartition(".")[2]] = {
                "spec": spec.digest,
                "bytes": size_of(opened, variant),
                "shared_memory": shared,
            }
    keep(drafter, "cuda-sm90", row)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("target", ["cuda-sm80", "cuda-sm86", "cuda-sm120"])
@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b-eagle3", "torchspec-qwen3-8b-eagle3-mla"])
def test_large_heads_fit_a_device_type_or_are_refused_by_name(name: str, target: str, tmp_path: Path) -> None:
    path, refusal = tmp_path / "x.aotpack", None
    try:
        build(specs_of(name), [target], path)
    except UnsupportedError as error:
        refusal = str(error)
    if refusal is not None:
        assert re.search(rf"does not fit {target}: kernel \w+ needs more shared memory", refusal)
        return
    capability = Target.parse(target).capability
    assert capability is not None
    with Package.open(path) as opened:
        (variant,) = opened.manifest.variants
        assert variant.requires.cuda is not None
        largest = max(kernel.shared_memory for kernel in variant.requires.cuda.kernels)
    assert largest <= DEVICES[capability].shared_memory


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_heads_that_fit_no_tiles_are_refused_by_kernel_and_device_type(tmp_path: Path) -> None:
    mask = MaskSpec(family="causal")
    huge = AttentionSpec(heads=1, kv_heads=1, head_dim=1024, dtype="bfloat16", mask=mask)
    with pytest.raises(UnsupportedError) as caught:
        build({"huge": huge}, ["cuda-sm86"], tmp_path / "x.aotpack")
    pattern = r"'huge' does not fit cuda-sm86: kernel \w+ needs more shared memory than its device type has"
    assert re.fullmatch(pattern, caught.value.problem)
    assert caught.value.expected == f"at most {DEVICES[8, 6].shared_memory} bytes a block"
    assert list(tmp_path.iterdir()) == []


def size_of(opened: Package, variant: Variant) -> int:
    """Bytes of a variant's libraries and kernels, unpacked."""
    return sum(len(opened.read_blob(key)) for key in variant.code)
