"""Tunings in a build: options reach the kernels, candidates are packages, and a check needs no record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aotpack.build import absent, build, check_build
from aotpack.build.candidates import build_candidates
from aotpack.build.search import checked_lengths, lengths_of, options_to_try
from aotpack.build.specialisations import ATTENTION, exact
from aotpack.build.tiles import Tiles
from aotpack.build.variants_cuda import _class_of, attention_graphs
from aotpack.errors import InputError, OutputError, UnsupportedError
from aotpack.package import Package
from aotpack.spec import AttentionSpec, MaskSpec, ScoreSpec
from aotpack.tuning import (
    CLASSES,
    DIRECTIONS,
    Attention,
    CandidateSet,
    Chip,
    Entry,
    Options,
    Record,
    Records,
    unfit,
)

SPEC = AttentionSpec(
    heads=4, kv_heads=2, head_dim=64, dtype="bfloat16", mask=MaskSpec(family="dflash", block_size=16)
)
CAUSAL = replace(SPEC, mask=MaskSpec(family="causal"))
HOPPER = Chip(name="NVIDIA H200", capability=(9, 0), multiprocessors=132)
FORWARD = {"rows": 128, "keys": 64, "warps": 8, "stages": 3, "abreast": 2, "tma": False}
BACKWARD = {"queries_stages": 3, "keys_rows": 32, "keys_warps": 8, "tma": True}

needs_cuda_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] not in absent.TRIED or torch.version.cuda is None,
    reason="building for CUDA needs the wheel of torch 2.14.1 for CUDA",
)


def record(*, mask: MaskSpec = SPEC.mask, **options: Options) -> Record:
    attention = Attention(head_dim=64, mask=mask.to_dict())
    entries = (
        Entry(
            attention=attention,
            kernels="dflash",
            direction=direction,
            length_class="any",
            options=chosen,
            reason="A test.",
        )
        for direction, chosen in options.items()
    )
    return Record(chip=HOPPER, entries=tuple(entries))


@pytest.mark.parametrize("kernels", ["template", "dflash"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("heads", [4, 40])
def test_a_search_is_small_and_of_options_that_fit(kernels: str, direction: str, heads: int) -> None:
    spec = replace(SPEC, heads=heads, head_dim=128, value_dim=128)
    known: Options = {"num_warps": 1} if kernels == "template" else {"tma": False}
    found = options_to_try(spec, kernels, direction, known)
    assert found[:2] == [{}, known]
    assert 10 <= len(found) <= 30
    assert [unfit(kernels, direction, options) for options in found] == [None] * len(found)
    assert len({json.dumps(options, sort_keys=True) for options in found}) == len(found)
    assert all(heads % options.get("abreast", 1) == 0 for options in found)


@pytest.mark.parametrize("spec", [SPEC, CAUSAL, replace(SPEC, mask=MaskSpec(family="dflash", block_size=7))])
@pytest.mark.parametrize("length_class", ["div128", "int32", "general", "any"])
def test_lengths_are_of_their_class(spec: AttentionSpec, length_class: str) -> None:
    found = (*lengths_of(spec, length_class), *checked_lengths(spec, length_class))
    for _, query, key in found:
        assert query % spec.mask.draft_size == 0
        assert (key > query) is (spec is not CAUSAL)
        if length_class == "div128":
            assert (query % 128, key % 128) == (0, 0)
        elif length_class != "any":
            assert (query % 128 != 0) or (key % 128 != 0)
    if length_class == "any":
        assert [query % 128 == 0 for _, query, _ in found].count(True) == 1


def test_a_specialisation_takes_the_options_of_its_class() -> None:
    assert [_class_of(kind, own=False) for kind in ATTENTION] == list(CLASSES["template"])
    assert _class_of(exact(1, 512, 1024), own=False) == "div128"
    assert _class_of(exact(1, 512, 1000), own=False) == "int32"
    assert {_class_of(kind, own=True) for kind in ATTENTION} == {"any"}


def test_the_first_tiles_are_the_tuning_s_and_smaller_ones_follow() -> None:
    tiles = Tiles.preferred({"forward": {"num_warps": 8, "BLOCK_M": 128, "PRESCALE_QK": True}})
    assert list(tiles.options.items()) == [
        ("fwd_BLOCK_M", 128),
        ("fwd_num_warps", 8),
        ("fwd_PRESCALE_QK", True),
    ]
    smaller = tiles.smaller("forward")
    assert smaller is not None
    assert smaller.options == {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32}
    assert Tiles.preferred({}).options == {}


@needs_cuda_torch
def test_options_of_the_template_are_in_its_graphs() -> None:
    tuned = {"forward": {"BLOCK_M": 32, "USE_TMA": True}, "backward": {"num_stages": 4}}
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        graphs = attention_graphs(CAUSAL, ATTENTION[-1], Tiles.preferred(tuned).options)
    for graph in graphs:
        (options,) = [
            argument
            for node in graph.module.graph.nodes
            if node.op == "call_function" and "flex_attention" in str(node.target)
            for argument in node.args
            if isinstance(argument, dict)
        ]
        assert {n: v for n, v in options.items() if n[:4] in ("fwd_", "bwd_")} == {
            "fwd_BLOCK_M": 32,
            "fwd_USE_TMA": True,
            "bwd_num_stages": 4,
        }


LAUNCHES = """
import json
from torch import _dynamo
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table
from aotpack.build.export import export
from aotpack.build.programs_dflash import attention_programs
from aotpack.build.specialisations import ATTENTION
from tests.build.test_tuning import BACKWARD, FORWARD, SPEC

found = {}
tuned = {"forward": FORWARD, "backward": BACKWARD}
with _dynamo.config.patch(fake_tensor_cache_enabled=False):
    for program in attention_programs(SPEC, ATTENTION[-1], tuned):
        for node in export(program.program).module.graph.nodes:
            if "constant_args_idx" in node.kwargs:
                kernel = table.get_kernel(node.kwargs["kernel_idx"])
                (config,) = kernel.configs
                found[kernel.fn.__name__] = {
                    **table.get_constant_args(node.kwargs["constant_args_idx"]),
                    "warps": config.num_warps,
                    "described": sorted(node.kwargs["tma_descriptor_metadata"]),
                }
print(json.dumps(found))
"""


@needs_cuda_torch
def test_options_of_our_kernels_are_in_their_launches() -> None:
    # A process of its own: the table of launches is the process's.
    done = subprocess.run([sys.executable, "-c", LAUNCHES], check=True, capture_output=True, text=True)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    names = ("block_m", "block_n", "warps", "stages", "tma", "abreast", "described")
    assert {kernel: [launch.get(name) for name in names] for kernel, launch in found.items()} == {
        "forward": [128, 64, 8, 3, False, 2, []],
        "backward_queries": [64, 64, 4, 3, True, 2, ["k", "v"]],
        "backward_keys": [32, 64, 8, 2, True, None, ["grad", "k", "q", "v"]],
    }


def test_heads_abreast_must_divide_the_heads() -> None:
    from aotpack.build.programs_dflash import attention_programs

    with pytest.raises(UnsupportedError, match="do not divide those of the spec"):
        attention_programs(SPEC, ATTENTION[-1], {"forward": {"abreast": 3}})


def test_a_record_of_another_chip_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    given = Records(given={"h200.json": record(forward=FORWARD)})
    for target in ("cuda-sm80", "cuda-sm100", "cpu"):
        with pytest.raises(InputError, match=r"the tuning record h200\.json is of another chip"):
            build({"full": SPEC}, [target], tmp_path / "x.aotpack", tuning=given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spec", "target", "problem"),
    [
        (SPEC, "cpu", "there is nothing to tune for cpu-"),
        (replace(CAUSAL, score=ScoreSpec(family="softcap", cap=3.0)), "cuda-sm90", "'full' cannot be tuned"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    spec: AttentionSpec, target: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=problem):
        build_candidates({"full": spec}, target, tmp_path / "candidates")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be made"):
        build_candidates({"full": SPEC}, "cuda-sm90", tmp_path / "no" / "where")


def few(spec: AttentionSpec, kernels: str, direction: str, known: Options | None) -> list[Options]:
    """Untuned, tuned, the same again by another name, and one that no device has room for."""
    if direction == "backward":
        return [{}]
    return [{}, {"keys": 32}, {"rows": 64}, {"rows": 128, "keys": 128, "warps": 8, "stages": 5, "tma": False}]


@needs_cuda_torch
@pytest.mark.slow
def test_candidates_are_packages_that_differ_in_one_program(tmp_path: Path) -> None:
    folder, spec = tmp_path / "candidates", replace(SPEC, head_dim=128, value_dim=128)
    made = build_candidates({"full": spec}, "cuda-sm90", folder, search=few)
    assert CandidateSet.read(folder) == made
    forward, backward = made.groups
    assert (forward.direction, backward.direction) == DIRECTIONS
    assert [each.package is None for each in forward.candidates] == [False, False, True, True]
    assert forward.candidates[2].refused == "the same code as candidate 0"
    assert "more shared memory than its device type has" in (forward.candidates[3].refused or "")
    kernels = []
    for candidate in (*forward.candidates[:2], *backward.candidates):
        with Package.open(folder / (candidate.package or "")) as opened:
            manifest = opened.manifest
            opened.check_frames(manifest.blobs)
        (variant,) = manifest.variants
        assert (manifest.specs, variant.target) == ({"full": spec}, "cuda-sm90")
        assert manifest.provenance["options"] == {"shapes": [], "candidate": dict(candidate.options)}
        assert manifest.provenance["torch"] == made.tools["torch"] == torch.__version__
        kernels.append({p.name: set(p.kernels) for p in variant.programs})
    untuned, tuned, other = kernels
    assert untuned == other
    assert {name for name in untuned if untuned[name] != tuned[name]} == {"forward"}


@needs_cuda_torch
@pytest.mark.slow
def test_a_tuned_package_is_checked_without_its_record(tmp_path: Path) -> None:
    path, plain = tmp_path / "tuned.aotpack", tmp_path / "plain.aotpack"
    found = record(forward={"keys": 32}, backward={"keys_rows": 32})
    build({"full": SPEC}, ["cuda-sm90"], path, tuning=Records(given={"x.json": found}))
    build({"full": SPEC}, ["cuda-sm90"], plain, tuning=Records())
    with Package.open(path) as opened, Package.open(plain) as other:
        tuning = opened.manifest.provenance["options"]["tuning"]
        assert other.manifest.provenance["options"]["tuning"] == {"records": {}, "options": {}}
        (mine,), (theirs,) = opened.manifest.variants, other.manifest.variants
    assert tuning["records"] == {found.digest: "NVIDIA H200"}
    chosen = tuning["options"]["cuda-sm90"][SPEC.digest]["any"]
    assert {direction: choice["options"] for direction, choice in chosen.items()} == {
        "forward": {"keys": 32},
        "backward": {"keys_rows": 32},
    }
    assert [a.kernels == b.kernels for a, b in zip(mine.programs, theirs.programs, strict=True)] == [
        True,
        False,
        False,
    ]
    check_build(path)
    done = subprocess.run(
        [sys.executable, "-m", "aotpack", "inspect", str(path)],
        check=True, capture_output=True, text=True, env=os.environ,
    )  # fmt: skip
    assert f"NVIDIA H200, record {found.digest}: cuda-sm90 backward any, cuda-sm90 forward any" in done.stdout
