"""build: names and files before it, stages while it runs, and nothing left when it is stopped."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aotpack.build import Stage, build
from aotpack.cli.console import Console
from aotpack.cli.progress import BuildProgress
from aotpack.cli.sources import default_output, read_sources
from aotpack.errors import InputError
from aotpack.package import Package, write_package
from tests.conftest import EXAMPLES
from tests.process import COMMAND, aotpack, only_object, rewritten

SMALL = EXAMPLES / "qwen2.5-0.5b-dflash"
LARGE = EXAMPLES / "qwen3-8b-dflash"
RECORD = EXAMPLES.parent / "aotpack" / "build" / "tuning" / "h200.json"
TINY = """
[specs.tiny]
heads = 2
kv_heads = 1
head_dim = 32
dtype = "float32"

[specs.tiny.mask]
family = "dflash"
block_size = 16
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_names_that_collide_are_an_error_that_says_how_to_rename():
    with pytest.raises(InputError) as caught:
        read_sources([str(SMALL), str(LARGE)], {})
    assert str(caught.value) == (
        "two sources have a spec that is named 'full'\n"
        "  expected: one name for each spec of a package\n"
        f"  found: {SMALL} and {LARGE}\n"
        f"  what to do: rename them: a={SMALL} b={LARGE} makes a.full and b.full"
    )


def test_a_prefix_renames_a_source():
    specs = read_sources([f"small={SMALL}", str(LARGE)], {})
    assert list(specs) == ["small.full", "full"]
    assert specs["small.full"].heads == 14


def test_overrides_win_over_the_config():
    assert read_sources([str(SMALL)], {"dtype": "float32"})["full"].dtype == "float32"


def test_a_path_with_an_equals_sign_is_a_path(tmp_path, tiny):
    odd = tiny.rename(tmp_path / "a=b.toml")
    assert list(read_sources([str(odd)], {})) == ["tiny"]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (SMALL, "qwen2.5-0.5b-dflash.aotpack"),
        (SMALL / "config.json", "qwen2.5-0.5b-dflash.aotpack"),
        (SMALL / "float32.toml", "float32.aotpack"),
        (f"a={SMALL}", "qwen2.5-0.5b-dflash.aotpack"),
    ],
)
def test_a_package_is_named_after_its_source(source, name):
    assert default_output([str(source)]) == Path(name)


def test_several_sources_need_a_name_for_the_package():
    with pytest.raises(InputError, match="several sources have no common name"):
        default_output(["a", "b"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SMALL, "--target", "cpu-z80"], "unknown target 'cpu-z80'"),
        ([SMALL, "-o", "/nowhere/x.aotpack"], "cannot be written"),
        (["/nowhere/config.json"], "does not exist"),
        ([SMALL, "--dtype", "float8"], "'float8' is not one of"),
        ([SMALL, "--shape", "1,512"], "--shape takes three lengths"),
        ([SMALL, "--shape", "1,512,1024"], "exact shapes are for CUDA targets"),
        ([SMALL, "-t", "cuda-sm90", "--shape", "1,500,1024"], "not whole blocks of 16 query rows"),
        ([SMALL, "-t", "cuda-sm90", "--shape", "1,512,512"], "not whole blocks of 16 query rows"),
        ([SMALL, "-t", "cuda-sm90", "--shape", "9999,8192,12288"], "2**31 elements or more"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_compiled(arguments, message, tmp_path):
    done = aotpack("build", *arguments, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_stages_are_plain_lines_where_stderr_is_no_terminal(capsys):
    with BuildProgress(Console()) as progress:
        progress(Stage(target="cpu", name="forward", spec="full", seconds=None))
        progress(Stage(target="cpu", name="forward", spec="full", seconds=12.34))
    assert capsys.readouterr() == ("", "cpu  full  forward  12.3 s\n")


def test_quiet_has_no_stages(capsys):
    with BuildProgress(Console(quiet=True)) as progress:
        progress(Stage(target="cpu", name="forward", spec=None, seconds=1.0))
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_live_line_that_goes_away(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with BuildProgress(Console()) as progress:
        progress(Stage(target="cpu", name="forward", spec="full", seconds=None))
        time.sleep(0.5)
    said = capsys.readouterr().err
    assert "cpu  full  forward  0 s ..." in said
    assert said.endswith("\r\x1b[2K")


def test_a_build_prints_one_object_and_its_stages(tiny, tmp_path):
    output = tmp_path / "tiny.aotpack"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = aotpack("build", tiny, "-o", output, "--json", TMPDIR=str(temporary))
    found = only_object(done)
    assert (done.returncode, found["schema"]) == (0, "aotpack.build/1")
    assert found["bytes"] == output.stat().st_size
    assert list(found["specs"]) == ["tiny"]
    assert {"kernels", "block_mask", "forward", "backward"} <= {stage["name"] for stage in found["stages"]}
    assert "tiny  forward" in done.stderr
    assert list(temporary.iterdir()) == []
    assert aotpack("selftest", output).returncode == 0


def test_a_package_is_built_again_elsewhere_to_the_same_bytes(float32_package, tmp_path):
    elsewhere = {"HOME": str(tmp_path), "USER": "somebody", "LOGNAME": "somebody", "TMPDIR": str(tmp_path)}
    altered = rewritten(float32_package, tmp_path / "altered.aotpack", vectors=b"other vectors")
    # One program at a time here; the first build compiled as many as there are cores.
    done = aotpack("build", "--check", altered, "--jobs", 1, "--json", **elsewhere)
    with Package.open(float32_package) as package, Package.open(altered) as other:
        digests = package.digest, other.digest
        target = package.manifest.variants[0].target
    found = only_object(done)
    assert done.returncode == 4
    # All that differs is what was altered: what is built here again has the digest of the first build.
    assert found["expected"] == f"digest {digests[0]}"
    assert found["found"] == f"digest {digests[1]}; other bytes in\n    full for {target}: golden vectors"


def test_another_toolchain_proves_nothing(float32_package, tmp_path):
    with Package.open(float32_package) as package:
        provenance = {**package.manifest.provenance, "torch": "2.13.0"}
        manifest = replace(package.manifest, provenance=provenance)
        blobs = {key: package.read_blob(key) for key in manifest.blobs}
    write_package(tmp_path / "older.aotpack", manifest, blobs)
    done = aotpack("build", "--check", tmp_path / "older.aotpack")
    assert done.returncode == 5
    assert "expected: torch 2.13.0" in done.stderr


def test_the_manifest_lists_what_is_inside(float32_package):
    document = json.loads(aotpack("inspect", float32_package, "--sbom").stdout)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    libraries = {c["name"]: c for c in document["components"] if c["type"] == "library"}
    assert {"aotpack", "torch", "libstdc++"} == set(libraries)
    assert libraries["torch"]["purl"] == f"pkg:pypi/torch@{libraries['torch']['version']}"
    with Package.open(float32_package) as package:
        keys = {program.library for v in package.manifest.variants for program in v.programs}
    assert {c["hashes"][0]["content"] for c in document["components"] if c["type"] == "file"} == keys


def processes_that_name(text):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            named = text.encode() in (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue
        if named and int(process.name) != os.getpid():
            found.append(process.name)
    return found


def test_jobs_are_counted_from_one(tmp_path):
    assert "--jobs" in aotpack("build", SMALL, "--jobs", 0, "-o", tmp_path / "x.aotpack").stderr
    with pytest.raises(InputError, match="no program can be compiled"):
        build(read_sources([str(SMALL)], {}), ["cpu"], tmp_path / "x.aotpack", jobs=0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_build_leaves_nothing_behind(number, tiny, tmp_path):
    folder, temporary = tmp_path / "out", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    process = subprocess.Popen(
        [*COMMAND, "build", str(tiny), "-o", str(folder / "x.aotpack"), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    # The first finished stage: the worker is compiling now.
    assert "kernels" in process.stderr.readline()
    assert list(temporary.iterdir()) != []
    process.send_signal(number)
    process.send_signal(number)
    done = subprocess.CompletedProcess(process.args, process.wait(), *process.communicate())
    assert done.returncode == 130
    assert only_object(done)["error"] == "Interrupted"
    assert list(folder.iterdir()) == []
    assert list(temporary.iterdir()) == []
    assert processes_that_name(str(tmp_path)) == []


@pytest.mark.slow
def test_a_model_of_transformers_is_a_source(tmp_path):
    config = EXAMPLES / "qwen3-tiny" / "config.json"
    output = tmp_path / "model.aotpack"
    done = aotpack("build", "--model", config, "-o", output, "--json")
    assert done.returncode == 0, done.stderr
    assert list(only_object(done)["specs"]) == ["causal"]
    assert output.exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((SMALL, "--padded"), "--padded and --packed are for --model"),
        ((SMALL, "--model", SMALL), "--model takes everything from the model"),
        (("--model", SMALL, "--window", 5), "--model takes everything from the model"),
        (("--model", "missing"), "there is no such model"),
        (("--check", SMALL / "config.json", "--packed"), "--check takes everything from the package"),
    ],
)
def test_options_that_contradict_a_model(options, problem):
    done = aotpack("build", *options)
    assert done.returncode == 2
    assert problem in done.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--record", "r.json"), "--record and --candidates are for --tune"),
        (("--candidates", "c"), "--record and --candidates are for --tune"),
        (("--tune", "--candidates", "c", "-o", "x.aotpack"), "--candidates builds no package"),
        (("--tune", "--candidates", "c", "--record", "r.json"), "--candidates builds no package"),
        (("--tune",), "--tune is for one CUDA target"),
        (("--tune", "-t", "cuda-sm80", "-t", "cuda-sm90"), "--tune is for one CUDA target"),
        (("--tuning", "missing.json"), "missing.json is not there"),
        (("--tuning", RECORD), "is of another chip than the build's targets"),
        (("--tuning", RECORD, "-t", "cuda-sm80"), "found: NVIDIA H200 (sm90)"),
    ],
)
def test_tunings_that_cannot_be_are_refused(options, problem, tmp_path):
    done = aotpack("build", SMALL, *options, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_tuning_without_a_gpu_ends_before_anything_is_compiled(tmp_path):
    output = tmp_path / "x.aotpack"
    done = aotpack("build", SMALL, "-t", "cuda-sm90", "--tune", "-o", output, "--json", TMPDIR=str(tmp_path))
    assert done.returncode == 5
    assert only_object(done)["problem"] == "there is no GPU here to measure candidates on"
    assert list(tmp_path.iterdir()) == []


def test_inspect_refuses_a_tuning_that_is_nonsense(float32_package, tmp_path):
    with Package.open(float32_package) as package:
        options = {"shapes": [], "tuning": {"records": [], "options": {}}}
        manifest = replace(package.manifest, provenance={**package.manifest.provenance, "options": options})
        blobs = {key: package.read_blob(key) for key in manifest.blobs}
    write_package(tmp_path / "x.aotpack", manifest, blobs)
    done = aotpack("inspect", tmp_path / "x.aotpack")
    assert done.returncode == 4
    assert "package manifest's tuning field 'options.tuning.records' is wrong" in done.stderr
