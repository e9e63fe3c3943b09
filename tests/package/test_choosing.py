"""Which calling conventions load, by device type."""

from __future__ import annotations

import dataclasses

import pytest

from aotpack.errors import HostError, InputError
from aotpack.package import Manifest
from aotpack.package.choosing import CALLING_CONVENTIONS, choose_variants
from aotpack.targets import CudaDevice, HostFacts

CPU_OF_VERSION_1 = (
    "the package uses a calling convention that this aotpack does not know on cpu\n"
    "  expected: 2\n"
    "  found: 1\n"
    "  what to do: install a newer aotpack, or build the package again with this one"
)


@pytest.fixture
def host() -> HostFacts:
    h200 = CudaDevice(name="NVIDIA H200", capability=(9, 0), shared_memory=232_448, driver="580")
    return HostFacts(
        machine="x86_64",
        instruction_set="x86_64-v3",
        glibc="2.36",
        libstdcxx="3.4.30",
        torch="2.14.1",
        torch_symbols=frozenset({"aoti_torch_empty_strided"}),
        libraries=frozenset({"libtorch_cpu.so"}),
        cuda_devices=(h200,),
    )


def test_cpu_programs_with_tiles_of_bytes_are_refused(manifest: Manifest, host: HostFacts) -> None:
    with pytest.raises(HostError) as refused:
        choose_variants(dataclasses.replace(manifest, calling_convention=1), host, "cpu")
    assert str(refused.value) == CPU_OF_VERSION_1


@pytest.mark.parametrize("convention", [1, 2])
def test_cuda_programs_load_from_before_and_after(
    manifest: Manifest, host: HostFacts, convention: int
) -> None:
    chosen = choose_variants(dataclasses.replace(manifest, calling_convention=convention), host, "cuda:0")
    assert {variant.target for variant in chosen.values()} == {"cuda-sm90"}


def test_cpu_programs_of_this_version_load(manifest: Manifest, host: HostFacts) -> None:
    chosen = choose_variants(dataclasses.replace(manifest, calling_convention=2), host, "cpu")
    assert {variant.target for variant in chosen.values()} == {"cpu-x86_64-v3"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_later_versions_are_refused(manifest: Manifest, host: HostFacts, device: str) -> None:
    later = max(CALLING_CONVENTIONS[device]) + 1
    with pytest.raises(HostError, match="calling convention"):
        choose_variants(dataclasses.replace(manifest, calling_convention=later), host, device)


def test_a_device_that_there_is_not(manifest: Manifest, host: HostFacts) -> None:
    with pytest.raises(InputError, match="unknown device"):
        choose_variants(manifest, host, "tpu")
