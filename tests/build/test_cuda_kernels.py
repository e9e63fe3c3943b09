"""Our own attention kernels: right when interpreted, and launched for the specs they were measured on."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
from torch._inductor.runtime import triton_heuristics

from aotpack.build import absent
from aotpack.build.export import export
from aotpack.build.kinds import has_kernels
from aotpack.build.launch import check_written, split_descriptors, warp_specialised
from aotpack.build.programs_dflash import attention_programs, block_mask_program
from aotpack.build.specialisations import ATTENTION
from aotpack.build.specialisations import exact as exact_shape
from aotpack.errors import BuildError, HostError
from aotpack.spec import AttentionSpec, MaskSpec
from tests.build.interpreted import CASES, TUNED

pytestmark = pytest.mark.skipif(
    torch.__version__.partition("+")[0] not in absent.TRIED or torch.version.cuda is None,
    reason="building for CUDA needs the wheel of torch 2.14.1 for CUDA",
)

SPEC = AttentionSpec(
    heads=4, kv_heads=2, head_dim=64, dtype="bfloat16", mask=MaskSpec(family="dflash", block_size=16)
)
HOPPER = (9, 0)


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, float]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.build.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_agree_with_dense_math(errors: dict[str, dict[str, float]], name: str) -> None:
    bound = 2e-6 if CASES[name][0].dtype == "float32" else 1e-3
    assert set(errors[name]) == {"out", "lse", "dq", "dk", "dv"}
    assert max(errors[name].values()) < bound


@pytest.mark.parametrize("name", TUNED)
def test_interpreted_kernels_agree_with_dense_math_whatever_their_options(
    errors: dict[str, dict[str, float]], name: str
) -> None:
    assert max(errors[name].values()) < 2e-6


@pytest.mark.parametrize(
    ("change", "capability"),
    [
        ({}, (8, 0)),
        ({}, (10, 0)),
        ({"dtype": "float32"}, HOPPER),
        ({"head_dim": 96}, HOPPER),
        ({"value_dim": 128}, HOPPER),
        ({"mask": MaskSpec(family="causal")}, HOPPER),
        ({"mask": MaskSpec(family="dflash-speculators", block_size=16)}, HOPPER),
    ],
)
def test_other_specs_and_devices_take_the_template(
    change: dict[str, Any], capability: tuple[int, int]
) -> None:
    usual = {name: getattr(SPEC, name) for name in ("heads", "kv_heads", "head_dim", "dtype", "mask")}
    assert has_kernels(SPEC, HOPPER)
    assert not has_kernels(AttentionSpec(**{**usual, **change}), capability)


def test_the_block_mask_is_the_anchors_of_kept_blocks() -> None:
    anchors = torch.tensor([[-5, 0, 7, 12, 400]])
    keep = torch.tensor([[True, True, False, True, True]])
    (ends,) = block_mask_program(SPEC).module(anchors, keep, torch.empty(1).expand(100))
    assert ends.dtype == torch.int32
    assert ends.tolist() == [[0, 0, -1, 12, 100]]


def test_an_exact_shape_has_no_dynamic_dimension() -> None:
    for each in attention_programs(SPEC, exact_shape(1, 512, 1024)):
        assert not any(each.program.dynamic_shapes)
        shapes = dict(zip(each.program.inputs, (tuple(a.shape) for a in each.program.args), strict=True))
        assert shapes["q"] == (1, 4, 512, 64)
        assert shapes["mask.ends"] == (1, 32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_kernel_that_is_taken_to_write_its_inputs_is_refused() -> None:
    """As torch takes any kernel, with no more than a warning, where triton has no driver."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        for each in attention_programs(SPEC, ATTENTION[-1]):
            with pytest.raises(BuildError, match="takes a kernel to write what it only reads"):
                check_written(export(each.program), each.results)


def test_descriptors_are_split_and_afterwards_torch_has_its_own() -> None:
    before = CUDADeviceOpOverrides.tma_descriptor_helpers
    source = before(CUDADeviceOpOverrides())
    with split_descriptors():
        changed = CUDADeviceOpOverrides().tma_descriptor_helpers()
        assert changed.replace("\n blockSizeInt[0] = 128 / elemSize;", "") == source != changed
    assert CUDADeviceOpOverrides.tma_descriptor_helpers is before


def test_other_descriptors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDADeviceOpOverrides, "tma_descriptor_helpers", lambda self: "nothing of the kind")
    with (
        pytest.raises(HostError, match="descriptors differ from those that aotpack was made for"),
        split_descriptors(),
    ):
        pass


# Not at the top: where there is no triton, these tests are skipped.
@pytest.fixture
def dflash() -> Any:
    return importlib.import_module("aotpack.build.kernels.dflash")


@pytest.fixture
def hopper() -> Any:
    return importlib.import_module("aotpack.build.kernels.hopper")


def test_warp_specialised_kernels_have_the_parameters_of_their_namesakes(dflash: Any, hopper: Any) -> None:
    for name in hopper.__all__:
        assert getattr(hopper, name).arg_names == getattr(dflash, name).arg_names


def test_kernels_are_replaced_where_they_say_so_and_afterwards_torch_has_its_own_way(
    dflash: Any, hopper: Any
) -> None:
    before = triton_heuristics.ASTSource
    types = dict.fromkeys(dflash.forward.arg_names, "constexpr") | {"k": "tensordesc<bf16[1, 128, 64]>"}
    with warp_specialised():
        replaced, kept = (
            triton_heuristics.ASTSource(dflash.forward, types, {"warp_specialised": chosen}, None)
            for chosen in (True, False)
        )
    assert (replaced.fn, kept.fn) == (hopper.forward, dflash.forward)
    assert kept.signature["k"] == types["k"]
    assert re.fullmatch(r"tensordesc<bf16\[1, 128, 64\],NVMMASharedLayout\(.*\)>", replaced.signature["k"])
    assert triton_heuristics.ASTSource is before


def test_another_way_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(triton_heuristics, "ASTSource")
    with pytest.raises(HostError, match="compiles kernels in another way"), warp_specialised():
        pass


def test_a_pipeline_loads_nothing_before_a_loop_of_no_rounds(dflash: Any) -> None:
    """With one head a group triton once dropped the condition, and a late tile lay where dk was written."""
    constants = {
        "heads": 2, "kv_heads": 2, "dim": 128, "size": 80, "window": 90, "scale": 0.1, "factor": 0.1,
        "block_m": 64, "block_n": 64, "stages": 2, "tma": True,
    }  # fmt: skip
    triton, compiler = importlib.import_module("triton"), importlib.import_module("triton.backends.compiler")
    kernel, tile = dflash.backward_keys, "tensordesc<bf16[1, 64, 128]>"
    types = {
        "ends_ptr": "*i32",
        "shift_ptr": "*fp32",
        "delta_ptr": "*fp32",
        "dk_ptr": "*bf16",
        "dv_ptr": "*bf16",
    }
    types |= dict.fromkeys(("q", "k", "v", "grad"), tile) | dict.fromkeys(("query", "key", "blocks"), "i32")
    types |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
    made = triton.compile(
        source, target=compiler.GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2}
    )
    # Of the loop's first pair of tiles; what is not pipelined waits for one tile at a time.
    expected = re.findall(r"@(%p\d+) mbarrier\.arrive\.expect_tx\S+ _, \[%r\d+\], 32768;", made.asm["ptx"])
    assert len(expected) == 2
    (thread,) = set(
        re.findall(r"@(%p\d+) mbarrier\.arrive\.expect_tx\S+ _, \[%r\d+\], 16384;", made.asm["ptx"])
    )
    for predicate in expected:
        assert re.search(rf"and\.pred\s+{predicate}, {thread}, %p\d+;", made.asm["ptx"]), predicate
