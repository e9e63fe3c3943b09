"""Standing in for an absent device: undone afterwards, refused on a torch that it was not tried on."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from aotpack.build import absent, compile_cuda
from aotpack.build.absent import DEVICES, DeviceType, absent_device, replacements
from aotpack.build.compile_cuda import SharedMemoryError
from aotpack.build.cubin import Cubin
from aotpack.build.cuda_toolkit import DRIVER_SYMBOLS
from aotpack.errors import HostError
from aotpack.targets import Kernel, Target

HOPPER = DEVICES[9, 0]

needs_cuda_wheel = pytest.mark.skipif(
    torch.__version__.partition("+")[0] not in absent.TRIED or torch.version.cuda is None,
    reason="building for CUDA needs the wheel of torch 2.14.1 for CUDA",
)


def asked() -> list[Any]:
    """What torch and triton answer from, without asking a device."""
    from triton.runtime import driver

    return [*(row.present for row in replacements(HOPPER, Path())), driver._active]


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@needs_cuda_wheel
@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: f"sm{device.number}")
def test_inside_torch_sees_the_device(device: DeviceType, tmp_path: Path) -> None:
    from torch._inductor.runtime.hints import DeviceProperties

    with absent_device(device, tmp_path):
        assert DeviceProperties.create(torch.device("cuda", 0)).cc == device.number
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.get_device_capability() == device.capability
        assert torch.cuda.get_device_properties(0).shared_memory_per_block_optin == device.shared_memory


@needs_cuda_wheel
def test_afterwards_everything_is_as_it_was(tmp_path: Path) -> None:
    before = asked()
    with absent_device(HOPPER, tmp_path):
        assert all(a is not b for a, b in zip(asked(), before, strict=True))
    assert all(a is b for a, b in zip(asked(), before, strict=True))


@needs_cuda_wheel
def test_a_failure_inside_undoes_everything_too(tmp_path: Path) -> None:
    before = asked()
    with pytest.raises(ZeroDivisionError), absent_device(HOPPER, tmp_path):
        raise ZeroDivisionError
    assert all(a is b for a, b in zip(asked(), before, strict=True))


@needs_cuda_wheel
def test_what_is_replaced_is_there() -> None:
    # torch makes the last one when it starts the driver, and finds the first one on machines with a toolkit.
    later = {"CUDA_HOME", "_get_device_properties"}
    missing = {row.name for row in replacements(HOPPER, Path()) if row.present is None}
    assert missing <= later


@needs_cuda_wheel
def test_the_driver_to_link_with_has_its_soname_and_defines_what_is_called(tmp_path: Path) -> None:
    with absent_device(HOPPER, tmp_path):
        pass
    text = run("readelf", "-dW", str(tmp_path / "cuda" / "lib64" / "libcuda.so"))
    assert "Library soname: [libcuda.so.1]" in text
    defined = run("nm", "-D", "--defined-only", str(tmp_path / "cuda" / "lib64" / "libcuda.so"))
    assert {line.split()[-1] for line in defined.splitlines()} >= set(DRIVER_SYMBOLS)


@pytest.mark.parametrize(
    ("version", "cuda", "found"),
    [
        ("2.15.0+cu130", "13.0", "torch 2.15.0+cu130"),
        ("2.13.0", "13.0", "torch 2.13.0"),
        ("2.14.1+cpu", None, "torch 2.14.1+cpu for the CPU"),
    ],
)
def test_an_untried_torch_is_refused_before_anything_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, cuda: str | None, found: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(HostError) as raised, absent_device(HOPPER, tmp_path):
        pass
    assert str(raised.value) == (
        "this torch cannot build for CUDA devices\n"
        "  expected: torch 2.14.1 for CUDA\n"
        f"  found: {found}\n"
        "  what to do: build in an environment with one of those; "
        "what it builds runs under torch 2.11 to 2.14"
    )
    assert not list(tmp_path.iterdir())


@needs_cuda_wheel
def test_missing_headers_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import triton

    (tmp_path / "triton").mkdir()
    monkeypatch.setattr(triton, "__file__", str(tmp_path / "triton" / "__init__.py"))
    with pytest.raises(HostError) as raised, absent_device(HOPPER, tmp_path):
        pass
    assert str(raised.value) == (
        "building for CUDA devices needs headers that are not installed\n"
        "  expected: nv/target of the package nvidia-cuda-cccl\n"
        "  what to do: pip install 'aotpack[cuda]'"
    )


def test_every_cuda_target_has_a_device_type() -> None:
    assert set(DEVICES) == {target.capability for target in Target.known() if target.device == "cuda"}


def test_too_much_shared_memory_is_refused_by_the_kernels_name() -> None:
    kernels = tuple(Kernel(name=f"kernel_{size}", shared_memory=size) for size in (101376, 101377))
    cubin = Cubin(path=Path("x.cubin"), capability="8.9", toolkit="12.9", ptx="8.8", kernels=kernels)
    compile_cuda.check_shared_memory([cubin], HOPPER)
    with pytest.raises(SharedMemoryError) as raised:
        compile_cuda.check_shared_memory([cubin], DEVICES[8, 9])
    assert str(raised.value) == (
        "kernel kernel_101377 needs more shared memory than its device type has\n"
        "  expected: at most 101376 bytes a block\n"
        "  found: 101377 bytes\n"
        "  what to do: report this spec"
    )
