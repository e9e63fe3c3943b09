"""A CUDA package built without a GPU, down to its cubins."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aotpack.build import absent, build, elf
from aotpack.build.absent import DEVICES, replacements
from aotpack.build.cuda_toolkit import DRIVER_SYMBOLS
from aotpack.drafter import specs_from_config
from aotpack.errors import NoVariantError
from aotpack.package import Manifest, Package, Variant
from aotpack.spec import AttentionSpec, MaskSpec
from aotpack.targets import CudaDevice, HostFacts, Reason, Target, match
from tests.conftest import EXAMPLES

SPEC = AttentionSpec(
    heads=4, kv_heads=2, head_dim=64, dtype="bfloat16", mask=MaskSpec(family="dflash", block_size=16)
)
SHAPE = (1, 512, 1024)

pytestmark = pytest.mark.skipif(
    torch.__version__.partition("+")[0] not in absent.TRIED or torch.version.cuda is None,
    reason="building for CUDA needs the wheel of torch 2.14.1 for CUDA",
)


def without_toolkit(path: Path, spec: AttentionSpec = SPEC, **options: Any) -> Path:
    if not path.exists():
        with pytest.MonkeyPatch.context() as patch:
            folders = os.environ["PATH"].split(os.pathsep)
            patch.setenv("PATH", os.pathsep.join(f for f in folders if not (Path(f) / "nvcc").exists()))
            patch.delenv("CUDA_HOME", raising=False)
            build({"full": spec}, ["cuda-sm90"], path, **options)
    return path


@pytest.fixture(scope="module")
def hopper(built: Path) -> Path:
    """With torch's template, which has programs for several classes of shapes."""
    return without_toolkit(built / "sm90.aotpack", shapes=[SHAPE], template=True)


@pytest.fixture(scope="module")
def own(built: Path) -> Path:
    """With kernels of our own, some of them warp-specialised."""
    return without_toolkit(built / "sm90.own.aotpack", replace(SPEC, head_dim=128, value_dim=128))


@pytest.fixture(scope="module")
def manifest(hopper: Path) -> Manifest:
    with Package.open(hopper) as package:
        return package.manifest


@pytest.fixture(scope="module")
def variant(manifest: Manifest) -> Variant:
    (variant,) = manifest.variants
    return variant


@pytest.fixture(scope="module")
def libraries(hopper: Path, variant: Variant, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("libraries")
    paths = []
    with Package.open(hopper) as package:
        for program in variant.programs:
            paths.append(folder / f"{program.name}.{program.specialisation}.so")
            paths[-1].write_bytes(package.read_blob(program.library))
    return paths


def test_kernels_of_our_own_are_one_program_for_any_size(own: Path, hopper: Path) -> None:
    with Package.open(own) as package:
        (variant,) = package.manifest.variants
    anything = {"max_batch": 65535, "max_length": 1 << 22}
    found = {(p.name, p.specialisation): p for p in variant.programs}
    assert list(found) == [(n, "general") for n in ("block_mask", "forward", "backward")]
    assert found["block_mask", "general"].outputs == ("ends",)
    for name in ("forward", "backward"):
        assert dict(found[name, "general"].bounds) == anything
        assert found[name, "general"].inputs[:4] == ("q", "k", "v", "mask.ends")
    assert found["backward", "general"].outputs == ("grad.q", "grad.k", "grad.v")
    cuda = variant.requires.cuda
    assert cuda is not None
    # Nothing else: no copies of what the kernels read.
    mask, *attention = (kernel.name for kernel in cuda.kernels)
    assert attention == ["forward", "backward_queries", "backward_keys"]
    assert mask.startswith("block_mask_general_triton_poi")
    assert "cuTensorMapEncodeTiled" in cuda.symbols
    room = DEVICES[9, 0].shared_memory
    for kernel in cuda.kernels:
        if kernel.name in ("forward", "backward_queries"):
            # Twelve warps with all that a multiprocessor has.
            assert room // 2 < kernel.shared_memory <= room
            assert (kernel.registers, kernel.spills) == (168, 0)
        else:
            # Two of them at once on a multiprocessor, each with a reserved KiB.
            assert 2 * (kernel.shared_memory + 1024) <= room + 1024
            assert kernel.spills is not None
            assert kernel.spills <= 64
    assert own.stat().st_size < hopper.stat().st_size


def test_kernels_of_our_own_are_hopper_code(own: Path, tmp_path: Path) -> None:
    operations = check_disassembly(own, tmp_path)
    # Registers are handed from warps that load to those that multiply.
    assert {name for name, found in operations.items() if "USETMAXREG" in found} == {
        "forward",
        "backward_queries",
    }


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_attention_comes_in_specialisations_the_tightest_first(variant: Variant) -> None:
    anything = {"max_batch": 65535, "max_length": 1 << 22}
    narrow = {**anything, "max_elements": (1 << 31) - 1}
    expected = [
        ("b1.q512.k1024", {"batch": 1, "query": 512, "key": 1024, "max_elements": (1 << 31) - 1}),
        ("div128", {**narrow, "divisor": 128}),
        ("int32", narrow),
        ("general", anything),
    ]
    for name in ("forward", "backward"):
        programs = [p for p in variant.programs if p.name == name]
        assert [(p.specialisation, dict(p.bounds)) for p in programs] == expected
    assert [(p.specialisation, dict(p.bounds)) for p in variant.programs if p.name == "block_mask"] == [
        ("general", narrow)
    ]


def test_cubins_are_for_the_target_and_fit_its_shared_memory(variant: Variant) -> None:
    cuda = variant.requires.cuda
    assert cuda is not None
    assert (cuda.capability, cuda.driver) == ("9.0a", "525")
    assert re.fullmatch(r"8\.\d", cuda.ptx or "")
    assert {"cuLaunchKernel", "cuModuleLoad", "cudaGetDevice"} <= set(cuda.symbols)
    assert sum("flex_attention" in kernel.name for kernel in cuda.kernels) >= 8
    for kernel in cuda.kernels:
        assert kernel.shared_memory <= DEVICES[9, 0].shared_memory
        assert 0 < (kernel.registers or 0) <= 255
        assert kernel.spills is not None


def test_each_program_lists_the_cubins_that_it_loads(hopper: Path, variant: Variant) -> None:
    with Package.open(hopper) as package:
        for program in variant.programs:
            library = package.read_blob(program.library)
            assert program.kernels
            for name, key in program.kernels:
                assert name.encode() in library
                assert package.read_blob(key).startswith(b"\x7fELF")


def test_libraries_need_the_driver_and_define_nothing_of_it(libraries: list[Path]) -> None:
    for library in libraries:
        assert "libcuda.so.1" in elf.needed(library)
        assert not {"libcudart.so.13", "libnvrtc.so.13"} & set(elf.needed(library))
        assert "cuLaunchKernel" in elf.imported_symbols(library)
        defined = {line.split()[-1] for line in run("nm", "-D", "--defined-only", str(library)).splitlines()}
        assert not defined & set(DRIVER_SYMBOLS)
        called = {name for name in elf.imported_symbols(library) if re.match(r"cu[A-Z]", name)}
        assert called <= set(DRIVER_SYMBOLS)


def test_host_code_is_portable_stripped_and_names_no_path(libraries: list[Path], variant: Variant) -> None:
    assert variant.requires.instruction_set in ("x86_64-v3", "aarch64")
    for library in libraries:
        assert not elf.uses_zmm(library)
        assert ".symtab" not in run("readelf", "-SW", str(library))
        assert b"/tmp" not in library.read_bytes()
        assert b"aotpack-build-" not in library.read_bytes()


def test_provenance_names_the_compilers(manifest: Manifest) -> None:
    assert {"torch", "triton", "compiler", "aotpack", "python"} <= set(manifest.provenance)


def test_building_replaces_nothing_in_the_callers_process(hopper: Path) -> None:
    for row in replacements(DEVICES[9, 0], Path()):
        assert getattr(row.present, "__module__", None) != "aotpack.build.absent"


# Tensor core instructions of each architecture; wgmma is HGMMA in SASS, tcgen05.mma is UTCHMMA.
MATRIX = {
    "sm_80": "HMMA",
    "sm_86": "HMMA",
    "sm_89": "HMMA",
    "sm_90": "HGMMA",
    "sm_100": "UTCHMMA",
    "sm_120": "HMMA",
}


def check_disassembly(package: Path, folder: Path) -> dict[str, set[str]]:
    """Each cubin's machine code is its target's, uses its tensor cores, and spills as the manifest says.

    Returns the operations of each function.
    """
    operations = {}
    tool = Path(importlib.import_module("triton").__file__ or "").parent / "backends/nvidia/bin/cuobjdump"
    with Package.open(package) as opened:
        for variant in opened.manifest.variants:
            if variant.requires.cuda is None:
                continue
            capability = variant.requires.cuda.capability.rstrip("af")
            assert variant.target == f"cuda-sm{capability.replace('.', '')}"
            spills = {(k.name, k.spills) for k in variant.requires.cuda.kernels}
            for name, key in {pair for program in variant.programs for pair in program.kernels}:
                (folder / name).write_bytes(opened.read_blob(key))
                text = run(str(tool), "-sass", str(folder / name))
                (target,) = re.findall(r"code for (sm_\d+)", text)
                assert variant.target == f"cuda-{target.replace('_', '')}"
                (function,) = re.findall(r"Function : (\S+)", text)
                ops = set(
                    re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", text, re.MULTILINE)
                )
                # Local memory is touched where, and only where, registers were spilled.
                assert ((function, 0) in spills) != bool(ops & {"STL", "LDL"}), function
                if "_tem_" in function or function in ("forward", "backward_queries", "backward_keys"):
                    assert MATRIX[target] in ops, function
                operations[function] = ops
    return operations


def test_the_committed_package_is_whole_small_and_for_five_targets(tmp_path: Path) -> None:
    artifact = Path(__file__).parent.parent.parent / "artifacts" / "qwen3-8b-dflash.aotpack"
    assert artifact.stat().st_size < 6_000_000
    with Package.open(artifact) as package:
        assert [v.target for v in package.manifest.variants] == [
            "cpu-x86_64-v3",
            "cuda-sm80",
            "cuda-sm90",
            "cuda-sm100",
            "cuda-sm120",
        ]
        assert package.manifest.specs == specs_from_config(EXAMPLES / "qwen3-8b-dflash")
        package.check_frames(package.manifest.blobs)
    check_disassembly(artifact, tmp_path)


def test_the_cubins_are_hopper_code(hopper: Path, tmp_path: Path) -> None:
    check_disassembly(hopper, tmp_path)


def host(capability: tuple[int, int], shared_memory: int, driver: str | None = "580.95.05") -> HostFacts:
    device = CudaDevice(name="GPU", capability=capability, shared_memory=shared_memory, driver=driver)
    return HostFacts(machine="x86_64", instruction_set="x86_64-v4", glibc="2.39", cuda_devices=(device,))


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (host((9, 0), 232448), Reason.ACCEPTED),
        (host((9, 0), 232448, "520.1"), Reason.DRIVER),
        (host((9, 0), 49152), Reason.SHARED_MEMORY),
        (host((8, 0), 166912), Reason.CAPABILITY),
        (host((10, 0), 232448), Reason.CAPABILITY),
    ],
)
def test_only_a_fitting_machine_takes_it(variant: Variant, facts: HostFacts, code: Reason) -> None:
    if variant.requires.instruction_set == "aarch64":
        pytest.skip("the made-up machines are x86_64")
    assert match(variant.requires, variant.target, facts, "cuda:0").code == code


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_loading_without_a_gpu_names_the_variant(hopper: Path) -> None:
    import aotpack

    with pytest.raises(NoVariantError, match="cuda-sm90: built for cuda, and cpu was asked for"):
        aotpack.load(hopper, device="cpu")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_device_type_builds_and_a_second_build_is_the_same(built: Path, tmp_path: Path) -> None:
    names = ["cuda-sm80", "cuda-sm86", "cuda-sm89", "cuda-sm100", "cuda-sm120"]
    variants = variants_of({"full": SPEC}, names, built / "all.aotpack")
    found = {v.target: v.requires.cuda.capability for v in variants if v.requires.cuda}
    assert found == dict(zip(names, ["8.0", "8.6", "8.9", "10.0a", "12.0a"], strict=True))
    check_disassembly(built / "all.aotpack", tmp_path)
    shared = {
        v.target: max(k.shared_memory for k in v.requires.cuda.kernels) for v in variants if v.requires.cuda
    }
    assert all(size <= DEVICES[Target.parse(t).capability].shared_memory for t, size in shared.items())  # type: ignore[index]
    # In one process with a spec that differs in the mask's parameters alone.
    sliding = replace(SPEC, mask=MaskSpec(family="dflash", block_size=16, window=64))
    again = variants_of({"sliding": sliding, "full": SPEC}, names[:1], built / "again.aotpack")
    assert again[1:] == variants[:1]
    kernels = [dict(p.kernels) for v in again for p in v.programs if p.name != "block_mask"]
    assert all(set(mine) != set(other) for mine, other in zip(kernels[:6], kernels[6:], strict=True))


def variants_of(specs: dict[str, AttentionSpec], targets: list[str], path: Path) -> tuple[Variant, ...]:
    build(specs, targets, path)
    with Package.open(path) as package:
        return package.manifest.variants
