"""pack.stats and the log: what was loaded, and what each call used."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import aotpack
from aotpack.package import Package
from aotpack.runtime.stats import Tally
from aotpack.store import Store
from tests.cases import make_case, run
from tests.process import with_target

SCRIPT = """
import sys, torch, aotpack
attend = aotpack.load(sys.argv[1]).attention("full")
spec = attend.spec
q, k, v = (
    torch.ones(1, heads, length, size, requires_grad=True)
    for heads, length, size in (
        (spec.heads, 16, spec.head_dim),
        (spec.kv_heads, 24, spec.head_dim),
        (spec.kv_heads, 24, spec.value_dim),
    )
)
anchors, keep = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
mask = attend.block_mask(anchors=anchors, keep=keep, context_len=8)
attend(q, k, v, mask).sum().backward()
"""


def test_calls_are_counted_by_attention_and_specialisation(float32_package):
    pack = aotpack.load(float32_package)
    attend = pack.attention("full")
    case = make_case(attend.spec, 1, 70, 3)
    for _ in range(3):
        run(attend, case)
    attend(case.q, case.k, case.v, attend.block_mask(**case.mask))
    stats = pack.stats()
    (one,) = stats.attentions.values()
    assert (one.block_masks, one.forward, one.backward) == (4, {"general": 4}, {"general": 3})
    assert stats.calls == 4
    assert one.spec == attend.spec.digest
    assert aotpack.load(float32_package).stats().calls == 0


def test_what_was_loaded_is_told(float32_package):
    pack = aotpack.load(float32_package)
    stats = pack.stats()
    folder = Path(stats.attentions["full"].folder)
    assert folder.parent == Store().root / "variants"
    libraries = [path.stat().st_size for path in folder.rglob("*.so")]
    with Package.open(float32_package) as package:
        distinct = len(package.manifest.variants[0].code)
    assert len(libraries) == distinct == 3
    assert stats.bytes == sum(libraries)
    assert 0 < stats.load_s < 600
    assert (stats.path, stats.digest, stats.device) == (str(float32_package), pack.digest, "cpu")
    assert stats.target == pack.target
    said = json.loads(json.dumps(stats.to_dict()))
    assert said["calls"] == 0
    assert said["attentions"]["full"]["forward"] == {"general": 0}


def test_dense_math_is_counted_as_eager(float32_package, tmp_path):
    elsewhere = with_target(float32_package, tmp_path / "other.aotpack", "cpu-aarch64")
    with pytest.warns(UserWarning, match="runs dense eager attention"):
        pack = aotpack.load(elsewhere, on_miss="eager")
    attend = pack.attention("full")
    run(attend, make_case(attend.spec, 1, 70, 3))
    stats = pack.stats()
    assert (stats.target, stats.bytes, stats.calls) == (None, 0, 1)
    assert stats.attentions["full"].forward == {"eager": 1}
    assert stats.attentions["full"].folder is None


def test_a_tally_of_many_threads_loses_nothing_and_reading_adds_nothing():
    tally, each, threads = Tally(), 20_000, 8
    ready = threading.Barrier(threads)

    def work() -> None:
        ready.wait()
        for number in range(each):
            tally.add()
            if number % 1000 == 0:
                assert 0 < tally.value <= each * threads

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        started = [threading.Thread(target=work) for _ in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert tally.value == tally.value == each * threads


def script(package: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "AOTPACK_LOG"}
    source = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(package)], env={**kept, "PYTHONPATH": source, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_it_is_quiet_by_default(float32_package):
    done = script(float32_package)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_debug_says_variant_specialisation_and_file_of_each_call(float32_package):
    done = script(float32_package, AOTPACK_LOG="debug")
    assert (done.returncode, done.stdout) == (0, "")
    lines = done.stderr.splitlines()
    for program, line in itertools.zip_longest(("block_mask", "forward", "backward"), lines[-3:]):
        assert f"{program} of 'full': cpu-x86_64-v3, general, " in line
        assert f"/{program}.general/library.so" in line
    assert any("loaded <aotpack pack" in line for line in lines)


def test_info_says_the_load_alone_and_another_word_is_refused(float32_package):
    done = script(float32_package, AOTPACK_LOG="info")
    (line,) = done.stderr.splitlines()
    assert "loaded <aotpack pack" in line
    done = script(float32_package, AOTPACK_LOG="loud")
    assert done.returncode == 1
    assert "AOTPACK_LOG names no level" in done.stderr


def test_a_logger_of_the_user_gets_it_without_the_variable(float32_package, caplog):
    attend = aotpack.load(float32_package).attention("full")
    case = make_case(attend.spec, 1, 70, 3)
    run(attend, case)
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, logger="aotpack"):
        run(attend, case)
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "block_mask",
        "forward",
        "backward",
    ]
