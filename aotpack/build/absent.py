"""Standing in for a CUDA device that the building machine does not have.

Inductor and triton ask the present device for its properties, load what they compile to measure it, and run
the program once. A build needs the first answered for another device and the rest left out. ``absent_device``
replaces the functions that ask, in the build's own process (``aotpack.build.worker``) and nowhere else; a
machine that has a GPU gets the same replacements, and so the same binaries.

The replacements reach into private parts of torch. Tried with torch 2.14.1 and triton 3.8.0; any other torch
is refused by ``check_torch``.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from aotpack.build.cuda_toolkit import make_toolkit
from aotpack.errors import HostError

__all__ = ["DEVICES", "TRIED", "DeviceType", "Replacement", "absent_device", "check_torch", "replacements"]

TRIED: Final = ("2.14.1",)

_MISSING: Final = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceType:
    """What the compiler asks of a device.

    Attributes:
        capability: compute capability.
        multiprocessors: of the largest data-centre or desktop part; decides how reductions are split.
        shared_memory: bytes that a block may opt in to.
        threads: resident threads of a multiprocessor.
        l2_cache: bytes.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    threads: int
    l2_cache: int

    @property
    def number(self) -> int:
        """The capability as triton writes it, 90 for 9.0."""
        return self.capability[0] * 10 + self.capability[1]


# Source: CUDA C++ programming guide, technical specifications per compute capability; whitepapers.
DEVICES: Final[Mapping[tuple[int, int], DeviceType]] = {
    (major, minor): DeviceType(
        capability=(major, minor),
        multiprocessors=multiprocessors,
        shared_memory=kib * 1024,
        threads=threads,
        l2_cache=mib << 20,
    )
    for major, minor, multiprocessors, kib, threads, mib in (
        (8, 0, 108, 163, 2048, 40),
        (8, 6, 84, 99, 1536, 6),
        (8, 9, 142, 99, 1536, 96),
        (9, 0, 132, 227, 2048, 50),
        (10, 0, 148, 227, 2048, 126),
        (12, 0, 170, 99, 1536, 96),
    )
}


def check_torch() -> None:
    """Refuses a torch that the replacements were not tried on; ``HostError``."""
    found = torch.__version__.partition("+")[0]
    if found not in TRIED or torch.version.cuda is None:
        raise HostError(
            "this torch cannot build for CUDA devices",
            expected=" or ".join(f"torch {version} for CUDA" for version in TRIED),
            found=f"torch {torch.__version__}{'' if torch.version.cuda else ' for the CPU'}",
            remedy="build in an environment with one of those; what it builds runs under torch 2.11 to 2.14",
        )


@contextlib.contextmanager
def absent_device(device: DeviceType, folder: Path) -> Iterator[None]:
    """Inside, torch and triton compile for ``device`` as its device 0; nothing can be run on it.

    Args:
        device: what to stand in for.
        folder: for what the compiler is given in a CUDA toolkit's place.

    Raises:
        HostError: this torch was not tried, or the CUDA headers are missing.
    """
    check_torch()
    from triton.runtime import driver

    toolkit = make_toolkit(folder)
    active = driver._active
    with contextlib.ExitStack() as undo:
        undo.callback(setattr, driver, "_active", active)
        driver.set_active(_Driver(device))
        for replacement in replacements(device, toolkit):
            undo.enter_context(replacement.made())
        _forget_devices()
        undo.callback(_forget_devices)
        yield


def _forget_devices() -> None:
    # Properties are asked once a process, and would outlive the device.
    from torch._dynamo import device_interface
    from torch._inductor.runtime.hints import DeviceProperties

    DeviceProperties.create.cache_clear()
    device_interface.caching_worker_device_properties.clear()


@dataclass(frozen=True, slots=True)
class Replacement:
    """Something of torch that would need the device. ``reason`` is what it is asked for."""

    owner: str
    name: str
    value: Any
    reason: str

    @property
    def present(self) -> Any:
        """What is there now; None when nothing is."""
        return vars(_find(self.owner)).get(self.name)

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Inside, ``value`` is there."""
        owner = _find(self.owner)
        found = vars(owner).get(self.name, _MISSING)
        setattr(owner, self.name, self.value)
        try:
            yield
        finally:
            if found is _MISSING:
                delattr(owner, self.name)
            else:
                setattr(owner, self.name, found)


def _find(path: str) -> Any:
    """A module, or a class in one: ``package.module:Class``."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def replacements(device: DeviceType, toolkit: Path) -> tuple[Replacement, ...]:
    """All that is replaced to stand in for ``device``, with ``toolkit`` as CUDA_HOME."""
    properties = _properties(device)
    return tuple(
        Replacement(*row)
        for row in (
            ("torch.utils.cpp_extension", "CUDA_HOME", str(toolkit), "headers, and a libcuda to link with"),
            # torch.cuda's own functions stay; these are what they ask.
            ("torch.cuda", "_lazy_init", _nothing, "starts the driver"),
            ("torch.cuda", "_device_count_nvml", lambda: 1, "how many devices the driver sees"),
            ("torch._C", "_cuda_getDeviceCount", lambda: 1, "how many devices there are"),
            ("torch._C", "_cuda_getDevice", lambda: 0, "the current device"),
            ("torch.cuda", "_exchange_device", lambda index: 0, "device guards around compilation"),
            ("torch.cuda", "_maybe_exchange_device", lambda index: 0, "device guards around compilation"),
            ("torch.cuda", "_get_device_properties", lambda index: properties, "tile tables, grid sizes"),
            ("torch.cuda", "get_rng_state", _random_state, "tracing keeps the random state"),
            ("torch.cuda", "set_rng_state", _nothing, "tracing keeps it; queues a call for the driver"),
            ("torch._inductor.scheduler", "has_triton", lambda: True, "answered and cached at import"),
            ("torch._inductor.fx_passes.joint_graph", "lazy_init", _nothing, "traces patterns on it"),
            ("torch._inductor.runtime.triton_helpers", "set_driver_to_gpu", _nothing, "triton's own driver"),
            # Compile, but do not load; define the kernels, but do not run the program.
            (_HEURISTICS + ":CachingAutotuner", "precompile", _compile_only(device), "loads each kernel"),
            (_WRAPPER, "generate_and_run_autotune_block", _define_kernels, "runs each kernel"),
        )
    )


_HEURISTICS: Final = "torch._inductor.runtime.triton_heuristics"
_WRAPPER: Final = "torch._inductor.codegen.wrapper:PythonWrapperCodegen"


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _random_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)


def _properties(device: DeviceType) -> SimpleNamespace:
    return SimpleNamespace(
        name="absent",
        major=device.capability[0],
        minor=device.capability[1],
        multi_processor_count=device.multiprocessors,
        total_memory=80 << 30,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=device.threads,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=device.shared_memory,
        shared_memory_per_multiprocessor=device.shared_memory + 1024,
        L2_cache_size=device.l2_cache,
        gcnArchName="",
        uuid="",
        is_integrated=False,
    )


class _Driver:
    """What triton asks of its active driver while it compiles."""

    def __init__(self, device: DeviceType) -> None:
        self._number = device.number

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._number, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _compile_only(device: DeviceType) -> Callable[..., None]:
    def precompile(autotuner: Any, *args: Any, **kwargs: Any) -> None:
        # A kernel that an earlier program had too comes compiled; it is saved again under this program.
        if not autotuner.compile_results:
            autotuner.configs = [_likely(autotuner)]
            autotuner._precompile_worker()
        while _excess(autotuner, device) and _pipelined(autotuner):
            _with_fewer_stages(autotuner)
        launcher = _Launcher(autotuner)
        autotuner.save_gpu_kernel(0, launcher)
        _complete(autotuner.inductor_meta["kernel_name"], launcher.bin.asm["ptx"])
        autotuner.launchers = [launcher]

    return precompile


def _likely(autotuner: Any) -> Any:
    """What measuring would most likely choose: for row-wise reductions, some 16 elements a thread.

    The first one has a row a block; on an H200 it takes four times as long for rows of 128.
    """
    if "PERSISTENT_REDUCTION" not in str(autotuner.heuristic_type):
        return autotuner.configs[0]
    row = math.prod(size for axis, size in autotuner.size_hints.items() if axis.startswith("r"))

    def distance(config: Any) -> float:
        elements = config.kwargs.get("XBLOCK", 1) * row / (32 * config.num_warps)
        return abs(math.log2(elements / 16))

    return min(autotuner.configs, key=distance)


def _complete(kernel: str, ptx: str) -> None:
    from torch._inductor.codecache import CudaKernelParamCache

    saved = CudaKernelParamCache.cache[kernel]
    # The library would carry the build's own path; it looks for the file's name in the folder it is given.
    saved["cubin_path"] = Path(saved["cubin_path"]).name
    saved["ptx"] = re.findall(r"^\.version (\S+)", ptx, re.MULTILINE)[0]


def _excess(autotuner: Any, device: DeviceType) -> bool:
    needs: int = autotuner.compile_results[0].kernel.metadata.shared
    return needs > device.shared_memory


def _pipelined(autotuner: Any) -> bool:
    stages: int = autotuner.compile_results[0].config.num_stages
    return stages > 1


def _with_fewer_stages(autotuner: Any) -> None:
    # With the device there, Inductor learns of too much shared memory when it loads the kernel, and then
    # compiles without pipelining at all.
    config = autotuner.compile_results[0].config
    config.num_stages -= 1
    autotuner.compile_results = [autotuner._precompile_config(config)]


class _Launcher:
    """What ``save_gpu_kernel`` reads of a kernel's launcher; it cannot launch."""

    def __init__(self, autotuner: Any) -> None:
        result = autotuner.compile_results[0]
        names = [n for n in autotuner.fn.arg_names if n not in result.compile_meta["constants"]]
        self.bin = result.kernel
        self.config = result.config
        self.def_args = [*names, *autotuner.inductor_meta.get("extra_launcher_args", [])]
        self.call_args = names
        # Not "or None": 0 adds an argument to the launch, None does not, and a wrong count crashes there.
        self.global_scratch = getattr(result.kernel.metadata, "global_scratch_size", None)
        self.profile_scratch = getattr(result.kernel.metadata, "profile_scratch_size", None)


def _define_kernels(wrapper: Any) -> None:
    wrapper.kernel_autotune_defs.splice("async_compile.wait(globals())\ndel async_compile\n")
    exec(wrapper.kernel_autotune_defs.getvalue(), {})  # noqa: S102 - Inductor's own way to compile its kernels
