"""Rules of a user's own: read from spec files, built, run without their module, and refused with a reason."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import aotpack
from aotpack import own
from aotpack.build import build
from aotpack.drafter import specs_from_config
from aotpack.errors import MismatchError, SpecError
from aotpack.spec import AttentionSpec, MaskSpec, ScoreSpec, TensorInput
from tests.cases import NAMES, Case, exact, relative_error, run

_numbers = itertools.count()
HEADS = {"heads": 2, "kv_heads": 1, "head_dim": 32, "dtype": "float32"}
SPEC = "[specs.mine]\nheads = 2\nkv_heads = 1\nhead_dim = 32\ndtype = 'float32'\n"
SEGMENTS = """
    import aotpack
    from NAME.near import near

    @aotpack.inputs(segments=("int64", "B", "K"))
    def rule(b, h, q_idx, kv_idx, segments):
        return near(q_idx, kv_idx) & (segments[b, q_idx] == segments[b, kv_idx])
    """
NEAR = """
    WIDTH = 40

    def near(q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < WIDTH
    """


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a package of modules below ``tmp_path``; returns its name, which no other test has."""

    def write(**modules: str) -> str:
        name = f"rules_of_test_{next(_numbers)}"
        (tmp_path / name).mkdir()
        for module, text in {"__init__": "", **modules}.items():
            (tmp_path / name / f"{module}.py").write_text(dedent(text).replace("NAME", name))
        return name

    return write


def attention(family: str, **mask: object) -> AttentionSpec:
    return AttentionSpec(**HEADS, mask=MaskSpec(family=family, **mask))  # type: ignore[arg-type]


def message(error: pytest.ExceptionInfo[SpecError]) -> str:
    return str(error.value)


def build_command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    # As the installed command: the current folder is not on the path by itself.
    command = [sys.executable, "-P", "-m", "aotpack", "build", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_a_package_needs_the_rule_only_where_it_is_built(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(masks=SEGMENTS, near=NEAR)
    (tmp_path / "spec.toml").write_text(f"{SPEC}mask = '{name}.masks:rule'\n")
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "mine.aotpack"
    done = build_command(tmp_path / "spec.toml", "-o", path, "--json", cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    assert importlib.util.find_spec(name) is None

    pack = aotpack.load(path)
    attend = pack.attention("mine")
    generator = torch.Generator().manual_seed(1)
    query, key = 150, 200
    segments = torch.randint(0, 3, (2, key), generator=generator).sort(-1).values

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    case = Case(
        q=draw(2, 2, query, 32), k=draw(2, 1, key, 32), v=draw(2, 1, key, 32),
        grad_out=draw(2, 2, query, 32), grad_lse=draw(2, 2, query),
        mask={"segments": segments, "query_len": query},
    )  # fmt: skip
    distance = torch.arange(query)[:, None] - torch.arange(key)[None, :]
    visible = (distance.abs() < 40) & (segments[:, :query, None] == segments[:, None, :])
    expected = exact(attend.spec, case, visible[:, None])
    for what, mine, right in zip(NAMES, run(attend, case), expected, strict=True):
        assert relative_error(mine, right) < 1e-5, what

    # Here the trainer has the module: a spec made in Python is the one that was built from the file.
    pack.require(pack.specs)
    with pytest.raises(SpecError, match="cannot be imported"):
        pack.require(attention(f"{name}.masks:rule"))
    monkeypatch.syspath_prepend(tmp_path)
    pack.require(attention(f"{name}.masks:rule"))
    assert aotpack.load(path, specs={"mine": attention(f"{name}.masks:rule")}).digest == pack.digest
    assert specs_from_config(tmp_path / "spec.toml") == pack.specs
    (tmp_path / name / "near.py").write_text(dedent(NEAR).replace("40", "41"))
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]
    with pytest.raises(MismatchError, match=r"mask\.source: expected"):
        pack.require(attention(f"{name}.masks:rule"))


def test_the_module_may_be_in_the_current_folder(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(masks=SEGMENTS, near=NEAR)
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "spec.toml").write_text(f"{SPEC}mask = '{name}.masks:rule'\n")
    before = list(sys.path)
    with pytest.raises(SpecError, match="cannot be imported"):
        specs_from_config(tmp_path / "specs" / "spec.toml")
    monkeypatch.chdir(tmp_path)
    (spec,) = specs_from_config(tmp_path / "specs" / "spec.toml").values()
    assert spec.mask.inputs == (TensorInput(name="segments", dtype="int64", dims=("B", "K")),)
    assert spec.mask.source == own.source_digest(own.function_of(f"{name}.masks:rule"))
    assert own.resolve(spec) == spec
    assert sys.path == before


def test_tensors_may_be_declared_in_the_spec_file(write: Callable[..., str], tmp_path: Path) -> None:
    name = write(masks="def rule(b, h, q_idx, kv_idx, ids): return ids[q_idx] == ids[kv_idx]\n")
    (tmp_path / "spec.toml").write_text(
        f"{SPEC}[specs.mine.mask]\nfamily = '{name}.masks:rule'\n"
        "inputs = [{ name = 'ids', dtype = 'int32', dims = ['K'] }]\n"
    )
    (spec,) = specs_from_config(tmp_path / "spec.toml").values()
    assert spec.mask.inputs == (TensorInput(name="ids", dtype="int32", dims=("K",)),)


def test_masks_are_joined_and_scores_named_in_a_spec_file(write: Callable[..., str], tmp_path: Path) -> None:
    name = write(rules=(
        "def odd(b, h, q_idx, kv_idx): return kv_idx % 2 == 1\n"
        "def bias(score, b, h, q_idx, kv_idx): return score + 0.5 * (q_idx == kv_idx)\n"
    ))  # fmt: skip
    rest = (
        f"score = '{name}.rules:bias'\n[specs.mine.mask]\nfamily = 'and'\n"
        f"parts = [{{ family = 'sliding', window = 64 }}, {{ family = '{name}.rules:odd' }}]\n"
    )
    (tmp_path / "spec.toml").write_text(SPEC + rest)
    (spec,) = specs_from_config(tmp_path / "spec.toml").values()
    digest = {rule: own.source_digest(own.function_of(f"{name}.rules:{rule}")) for rule in ("odd", "bias")}
    odd = MaskSpec(family=f"{name}.rules:odd", source=digest["odd"])
    assert spec.mask.parts == (MaskSpec(family="sliding", window=64), odd)
    assert spec.score == ScoreSpec(family=f"{name}.rules:bias", source=digest["bias"])


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """The folder of a DFlash drafter's config, with blocks of 16."""
    example = Path(__file__).parent.parent / "examples" / "qwen3-8b-dflash" / "config.json"
    (tmp_path / "config.json").write_text(example.read_text())
    return tmp_path


DRAFTING = """
    import aotpack

    @aotpack.inputs(anchors=("int64", "B", "N"))
    def rule(b, h, q_idx, kv_idx, anchors):
        return kv_idx < anchors[b, q_idx // 16]
    """


def test_a_rule_that_drafts_takes_the_block_size_of_the_config(
    write: Callable[..., str], drafter: Path
) -> None:
    name = write(masks=DRAFTING)
    path = drafter / "spec.toml"
    path.write_text(f"config = 'config.json'\nmask = '{name}.masks:rule'\nscore = '{name}.masks:rule'\n")
    with pytest.raises(SpecError, match="wrong arguments"):
        specs_from_config(path)
    path.write_text(f"config = 'config.json'\nmask = '{name}.masks:rule'\n")
    specs = specs_from_config(path)
    assert list(specs) == ["rule"]
    assert specs["rule"].mask.block_size == 16
    assert specs_from_config(path, block_size=8)["rule"].mask.block_size == 8


def test_a_rule_that_drafts_without_a_block_size(write: Callable[..., str], tmp_path: Path) -> None:
    name = write(masks=DRAFTING)
    path = tmp_path / "spec.toml"
    path.write_text(f"{SPEC}mask = '{name}.masks:rule'\n")
    with pytest.raises(SpecError) as caught:
        specs_from_config(path)
    assert message(caught) == (
        f"spec file '{path}': [specs.mine]: the rule '{name}.masks:rule' drafts, as a tensor of it has the "
        "axis 'N', and has no block size\n"
        "  expected: block_size, the query rows of one anchor\n"
        "  what to do: say block_size in the mask, or rename the axis"
    )


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "the rule 'NAME.masks:rule' cannot be imported\n  expected: module:function, importable"),
        ("import no_such_module_here\n", "the rule 'NAME.masks:rule' cannot be imported"),
        ("rule = 7\n", "the rule 'NAME.masks:rule' is no function"),
        ("rule = lambda b, h, q, kv: q >= kv\n", "the rule 'NAME.masks:rule' is a lambda"),
        (
            "def make(n):\n    def rule(b, h, q, kv): return q - kv < n\n    return rule\nrule = make(3)\n",
            "the rule 'NAME.masks:rule' is the closure make.<locals>.rule",
        ),
        (
            "table = [1, 2]\ndef rule(b, h, q_idx, kv_idx): return q_idx >= table[0]\n",
            (
                "the rule NAME.masks.rule reads 'table'\n"
                "  expected: a constant: a number, a string or a truth value\n"
                "  found: list\n"
                "  what to do: pass it: declare 'table' as a tensor input"
            ),
        ),
        (
            "def rule(b, h, q_idx, kv_idx, ids): return ids[q_idx] == ids[kv_idx]\n",
            (
                "the rule 'NAME.masks:rule' has the wrong arguments\n"
                "  expected: b, h, q_idx, kv_idx, then nothing more\n"
                "  found: b, h, q_idx, kv_idx, ids\n"
                "  what to do: declare each tensor it reads with @aotpack.inputs or in the spec"
            ),
        ),
        ("def rule(q_idx, kv_idx): return q_idx >= kv_idx\n", "has the wrong arguments"),
    ],
    ids=["absent", "import", "value", "lambda", "closure", "global", "undeclared", "short"],
)
def test_a_rule_that_cannot_be_used_is_refused(
    text: str, wrong: str, write: Callable[..., str], tmp_path: Path
) -> None:
    name = write(masks=text)
    path = tmp_path / "spec.toml"
    path.write_text(f"{SPEC}mask = '{name}.masks:rule'\n")
    with pytest.raises(SpecError) as caught:
        specs_from_config(path)
    assert wrong.replace("NAME", name) in message(caught)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("def rule(b, h, q_idx, kv_idx): return q_idx >= kv_idx + h\n", "the mask differs between heads"),
        (
            "def rule(b, h, q_idx, kv_idx): return q_idx >= kv_idx.no_such_method()\n",
            "the rule 'NAME.masks:rule' fails\n  expected: a rule that can be evaluated\n  found: Attribute",
        ),
    ],
    ids=["head", "failing"],
)
def test_a_rule_that_fails_is_refused_before_anything_is_compiled(
    text: str, wrong: str, write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(masks=text)
    monkeypatch.syspath_prepend(tmp_path)
    stages: list[object] = []
    with pytest.raises(SpecError) as caught:
        build(
            {"mine": attention(f"{name}.masks:rule")}, ["cpu"], tmp_path / "x.aotpack", progress=stages.append
        )
    assert wrong.replace("NAME", name) in message(caught)
    assert stages == []


def test_a_rule_that_changed_is_refused_by_builder_and_worker(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(masks=SEGMENTS, near=NEAR)
    monkeypatch.syspath_prepend(tmp_path)
    spec = own.resolve(attention(f"{name}.masks:rule"))
    assert own.resolve(spec) == spec
    assert own.folders(spec) == (str(tmp_path),)
    stale = replace(spec, mask=replace(spec.mask, source="0" * 64))
    changed = f"the rule '{name}.masks:rule' has changed since its spec was made"
    with pytest.raises(SpecError, match=changed):
        build({"mine": stale}, ["cpu"], tmp_path / "x.aotpack")
    assert own.resolve(stale, anew=False) == stale

    job = {
        "specs": {"mine": stale.to_dict()}, "target": "cpu-x86_64-v3", "shapes": [],
        "modules": [str(tmp_path)], "folder": str(tmp_path),
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    worker = [sys.executable, "-m", "aotpack.build.worker", str(tmp_path / "job.json")]
    done = subprocess.run(worker, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["error"], said["problem"]) == ("SpecError", changed)


def test_two_modules_of_one_name_are_told_apart(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(masks=SEGMENTS, near=NEAR)
    other = tmp_path / "other" / name
    other.mkdir(parents=True)
    (other / "masks.py").write_text("def rule(b, h, q_idx, kv_idx): return q_idx >= kv_idx\n")
    (other / "__init__.py").write_text("")
    for folder in (tmp_path, other.parent):
        (folder / "spec.toml").write_text(f"{SPEC}mask = '{name}.masks:rule'\n")
    specs_from_config(tmp_path / "spec.toml")
    with pytest.raises(SpecError) as caught:
        specs_from_config(other.parent / "spec.toml")
    assert f"two modules are named '{name}'\n  expected: {other}/__init__.py\n" in message(caught)


def test_a_resolved_spec_is_another_one_and_survives_json(write: Callable[..., str], tmp_path: Path) -> None:
    name = write(masks=SEGMENTS, near=NEAR)
    with own.importable(tmp_path):
        spec = own.resolve(attention(f"{name}.masks:rule"))
    assert AttentionSpec.from_dict(json.loads(spec.to_json())) == spec
    assert spec.digest != attention(f"{name}.masks:rule").digest


def test_a_rule_is_named_by_its_function() -> None:
    assert own.reference(relative_error) == "tests.cases:relative_error"
    with pytest.raises(SpecError, match="cannot be named"):
        own.reference(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)


def test_specs_without_own_rules_are_left_as_they_are() -> None:
    spec = AttentionSpec(**HEADS, mask=MaskSpec(family="causal"))
    assert own.resolve(spec) is spec
    assert own.folders(spec) == ()
