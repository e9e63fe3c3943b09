"""A tiny package, whole in a few kilobytes; ``assets/tiny.aotpack`` is this one, written once and kept."""

import random
from pathlib import Path

import pytest

from aotpack.package import Manifest, Program, Variant, blob_key
from aotpack.spec import AttentionSpec, MaskSpec
from aotpack.targets import CudaRequirements, Kernel, Requirements

RUNTIME = random.Random(0).randbytes(600)


def _library(tag):
    return RUNTIME + f"the code of {tag}".encode()


def _program(name, target, kernels=()):
    library = blob_key(_library(f"{name} for {target}"))
    return Program(name=name, library=library, kernels=kernels, inputs=("q", "k"), outputs=("out",))


@pytest.fixture
def blobs():
    names = ("block_mask", "forward", "backward")
    raw = [_library(f"{name} for {target}") for target in ("cpu-x86_64-v3", "cuda-sm90") for name in names]
    return {blob_key(data): data for data in [*raw, b"a cubin", b"golden vectors"]}


@pytest.fixture
def manifest():
    mask = MaskSpec(family="dflash", block_size=16)
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=64, dtype="float32", mask=mask)
    kernels = (("ckernel.cubin", blob_key(b"a cubin")),)
    symbols = ("aoti_torch_empty_strided",)
    cpu = Requirements(
        instruction_set="x86_64-v3", glibc="2.34", needed=("libtorch_cpu.so",), torch_symbols=symbols
    )
    kernel = Kernel(name="flex", shared_memory=1024, registers=64, spills=0)
    cuda = Requirements(cuda=CudaRequirements(capability="9.0a", kernels=(kernel,), driver="525"))

    def variant(target, requires, kernels=()):
        names = ("block_mask", "forward", "backward")
        return Variant(
            spec=spec.digest,
            target=target,
            programs=tuple(_program(name, target, kernels) for name in names),
            requires=requires,
            vectors=blob_key(b"golden vectors"),
            tolerance={"out": 1e-05},
        )

    return Manifest(
        calling_convention=1,
        specs={"full": spec},
        variants=(variant("cpu-x86_64-v3", cpu), variant("cuda-sm90", cuda, kernels)),
        provenance={"torch": "2.14.1", "options": {"simdlen": 256}},
    )


@pytest.fixture
def assets():
    return Path(__file__).parent / "assets"
