"""From candidates to a record: real packages for the CPU, one of which computes something else."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import aotpack
from aotpack.bench.jobs import candidate as job
from aotpack.bench.jobs.drawing import RESULTS, dense_results, draw_step, relative_errors
from aotpack.bench.tune import Report, tune
from aotpack.errors import HostError, InputError, SelfTestError
from aotpack.package import Package, write_package
from aotpack.targets import Target
from aotpack.tuning import Candidate, CandidateSet, Group, Measured, Record, best, mean
from tests.conftest import MASKS
from tests.process import aotpack as run_aotpack
from tests.process import only_object

LENGTHS = ((1, 96, 96), (2, 64, 130))
ORDER = ("right", "right-again", "wrong", "other-spec", "broken", "missing")


def causal_with(masks_package: Path, path: Path, mask_of: str) -> Path:
    """A package of the spec "causal" alone, with the block mask program of another spec."""
    with Package.open(masks_package) as opened:
        manifest = opened.manifest
        found = {
            name: next(v for v in manifest.variants if v.spec == spec.digest)
            for name, spec in manifest.specs.items()
        }
        own = [p for p in found["causal"].programs if p.name != "block_mask"]
        mask = [p for p in found[mask_of].programs if p.name == "block_mask"]
        variant = replace(found["causal"], programs=(*mask, *own))
        blobs = {key: opened.read_blob(key) for key in variant.blobs}
    specs = {"causal": manifest.specs["causal"]}
    write_package(path, replace(manifest, specs=specs, variants=(variant,)), blobs)
    return path


def group(direction: str, *candidates: Candidate, lengths: Any = LENGTHS) -> Group:
    return Group(
        name="causal",
        spec=spec_of("causal"),
        kernels="cpu",
        direction=direction,
        length_class="any",
        lengths=lengths,
        checked=((1, 50, 70),),
        candidates=candidates,
    )


def spec_of(name: str) -> aotpack.AttentionSpec:
    from tests.conftest import SMALL

    return aotpack.AttentionSpec(dtype="float32", mask=MASKS[name], **SMALL)


def write_set(folder: Path, *groups: Group, target: str = "cpu") -> CandidateSet:
    found = CandidateSet(target=Target.parse(target), tools={"torch": "2.14.1+cu130"}, groups=groups)
    found.write(folder)
    return found


@pytest.fixture(scope="module")
def folder(masks_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("candidates")
    causal_with(masks_package, path / "right.aotpack", "causal")
    shutil.copy(path / "right.aotpack", path / "right-again.aotpack")
    causal_with(masks_package, path / "wrong.aotpack", "everything")
    with Package.open(masks_package) as opened:
        manifest = opened.manifest
        specs = {"causal": manifest.specs["everything"]}
        (variant,) = [v for v in manifest.variants if v.spec == specs["causal"].digest]
        blobs = {key: opened.read_blob(key) for key in variant.blobs}
    write_package(path / "other-spec.aotpack", replace(manifest, specs=specs, variants=(variant,)), blobs)
    (path / "broken.aotpack").write_bytes((path / "right.aotpack").read_bytes()[:5000])
    built = [Candidate(options={}, package=f"{name}.aotpack") for name in ORDER]
    refused = Candidate(options={}, refused="needs more shared memory")
    write_set(path, group("forward", *built, refused), group("backward", *built[:3]))
    return path


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    path = tmp_path_factory.mktemp("record") / "record.json"
    return path, tune(folder, path, "cpu", repeat=3, checks=2)


def candidates_of(report: Report, direction: str) -> tuple[Measured, ...]:
    (entry,) = [entry for entry in report.record.entries if entry.direction == direction]
    return entry.candidates


def test_right_candidates_are_timed_and_the_others_say_why_not(measured: tuple[Path, Report]) -> None:
    path, report = measured
    assert report.measured == ("causal forward any", "causal backward any")
    assert report.without == ()
    assert Record.read(path) == report.record
    found = dict(zip((*ORDER, "refused"), candidates_of(report, "forward"), strict=True))
    for name in ("right", "right-again"):
        assert found[name].ok
        assert 0 < (found[name].error or 0) < 1e-5
        assert [timed.lengths for timed in found[name].timings] == list(LENGTHS)
        assert all(timed.count == 3 for timed in found[name].timings)
    reasons = {name: each.why or "" for name, each in found.items() if not each.ok}
    assert reasons["wrong"].startswith("SelfTestError: out is ")
    assert "from dense fp64 math" in reasons["wrong"]
    assert reasons["other-spec"].startswith("MismatchError: the package was built for another attention")
    assert reasons["broken"].startswith("IntegrityError: ")
    assert reasons["missing"].startswith("InputError: ")
    assert reasons["refused"] == "needs more shared memory"
    assert all(each.timings == () for each in found.values() if not each.ok)
    assert [each.ok for each in candidates_of(report, "backward")] == [True, True, False]


def test_the_fastest_right_candidate_is_chosen_and_never_another(measured: tuple[Path, Report]) -> None:
    _, report = measured
    right, again, wrong, *rest = candidates_of(report, "forward")

    def faster(candidate: Measured, factor: float) -> Measured:
        timings = (replace(t, median=t.median * factor) for t in right.timings)
        return replace(candidate, timings=tuple(timings))

    assert best([right, faster(again, 0.5), wrong, *rest]) == faster(again, 0.5)
    assert best([right, again, faster(wrong, 0.1), *rest]) in (right, again)
    # A hundredth is noise: the plainer one, which comes first, is kept.
    assert best([right, faster(again, 0.995)]) == right
    assert best([right, faster(again, 0.98)]) == faster(again, 0.98)
    # The fastest at one length alone is not the fastest, and one that was not measured everywhere is out.
    short, long = right.timings
    lopsided = replace(again, timings=(replace(short, median=short.median / 2), replace(long, median=9.0)))
    assert best([right, lopsided]) == right
    assert best([right, replace(faster(again, 0.1), timings=(short,))]) == right
    assert best([wrong, *rest]) is None
    assert best([]) is None
    assert mean(faster(right, 0.25)) == pytest.approx(mean(right) / 4)


def test_a_run_goes_on_where_it_stopped(folder: Path, measured: tuple[Path, Report], tmp_path: Path) -> None:
    path, report = measured
    partial = tmp_path / "record.json"
    kept = [entry for entry in report.record.entries if entry.direction == "backward"]
    replace(report.record, entries=tuple(kept)).write(partial)
    said: list[str] = []
    found = tune(folder, partial, "cpu", repeat=1, checks=1, say=said.append)
    assert found.measured == ("causal forward any",)
    assert "causal backward any: in the record already" in said
    assert [e for e in found.record.entries if e.direction == "backward"] == kept
    before = path.read_bytes()
    assert tune(folder, path, "cpu").measured == ()
    assert path.read_bytes() == before


def test_a_record_of_another_chip_is_not_written_over(
    folder: Path, measured: tuple[Path, Report], tmp_path: Path
) -> None:
    _, report = measured
    path = tmp_path / "record.json"
    other = replace(report.record, chip=replace(report.record.chip, name="Another"))
    other.write(path)
    with pytest.raises(InputError, match="is a record of another chip or toolchain"):
        tune(folder, path, "cpu")
    assert Record.read(path) == other


def test_a_group_without_a_right_candidate_is_not_in_the_record(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "wrong.aotpack", tmp_path)
    wrong = Candidate(options={}, package="wrong.aotpack")
    write_set(tmp_path, group("forward", wrong))
    done = run_aotpack("tune", tmp_path, "-o", tmp_path / "record.json", "--device", "cpu", "--json")
    assert done.returncode == 7, done.stderr
    assert only_object(done)["without"] == ["causal forward any"]
    assert "no candidate may be chosen for causal forward any" in done.stderr
    assert not (tmp_path / "record.json").exists()


def test_the_command_prints_what_was_chosen(folder: Path, measured: tuple[Path, Report]) -> None:
    path, report = measured
    done = run_aotpack("tune", folder, "-o", path, "--device", "cpu", "--json")
    found = only_object(done)
    assert (done.returncode, found["schema"], found["measured"]) == (0, "aotpack.tune/1", [])
    assert found["digest"] == report.record.digest
    assert [(each["direction"], each["right"]) for each in found["chosen"]] == [
        ("backward", 2),
        ("forward", 2),
    ]
    assert "over untuned" in run_aotpack("tune", folder, "-o", path, "--device", "cpu").stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_measured(folder: Path, tmp_path: Path) -> None:
    write_set(tmp_path, group("forward", Candidate(options={}, package="x.aotpack")), target="cuda-sm90")
    with pytest.raises(HostError, match="there is no GPU here to measure candidates on"):
        tune(tmp_path, tmp_path / "record.json")
    for device in ("cuda", "cuda:1", "cpu"):
        done = run_aotpack("tune", tmp_path, "-o", tmp_path / "record.json", "--device", device, "--json")
        assert done.returncode == 5
        assert only_object(done)["expected"] == "a device for cuda-sm90"
    assert not (tmp_path / "record.json").exists()


def test_a_folder_without_candidates_is_refused(tmp_path: Path) -> None:
    done = run_aotpack("tune", tmp_path, "-o", tmp_path / "record.json")
    assert done.returncode == 2
    assert "holds no candidates" in done.stderr


@pytest.mark.parametrize("name", MASKS)
def test_steps_of_every_mask_agree_with_dense_math(masks_pack: aotpack.Pack, name: str) -> None:
    spec = masks_pack.specs[name]
    drafts = spec.mask.draft_size > 1
    step = draw_step(spec, 2, 160, 160 + 70 if drafts else 160, "cpu")
    attend = masks_pack.attention(name)
    errors = relative_errors(job._results(attend, step), dense_results(step))
    assert tuple(errors) == RESULTS
    assert max(errors.values()) < 1e-5


class _Racing:
    """An attention whose result is off by the least bit in its fourth call."""

    def __init__(self, attend: aotpack.Attention) -> None:
        self._attend, self._calls, self.block_mask = attend, 0, attend.block_mask

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = self._attend(*args, **options)
        self._calls += 1
        if self._calls == 4:
            out.data[..., -1] = torch.nextafter(out.data[..., -1], torch.tensor(torch.inf))
        return out, lse


def test_results_that_do_not_stay_the_same_are_wrong(masks_pack: aotpack.Pack) -> None:
    attend: Any = masks_pack.attention("causal")
    step = draw_step(attend.spec, 1, 64, 64, "cpu")
    tolerance: Mapping[str, float] = dict.fromkeys(RESULTS, 1e-5)
    assert job._check(attend, attend, step, tolerance, 5) < 1e-5
    with pytest.raises(SelfTestError, match=r"differed in repetition 3: the kernels race"):
        job._check(_Racing(attend), attend, step, tolerance, 5)  # type: ignore[arg-type]
