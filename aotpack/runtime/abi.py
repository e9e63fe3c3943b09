"""One AOTInductor library through its C ABI, called without holding the GIL.

The only module that touches ``torch._C._aoti``. Tried with torch 2.11.0, 2.13.0 and 2.14.1, on libraries
built by 2.14.1. torch's own ``AOTIModelPackageLoader`` holds the GIL while a program runs
(pytorch issue 197516); ctypes releases it for the length of the foreign call.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.errors import AotpackError, HostError

__all__ = ["INSTANCES", "Library"]

# How many calls of one program may run at the same moment on the CPU; a further one waits, without the GIL,
# for the first to return.
INSTANCES: Final = 16

_HANDLE: Final = ctypes.c_void_p
_CREATE: Final[list[Any]] = [ctypes.POINTER(_HANDLE), ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p]
_RUN: Final[list[Any]] = [_HANDLE, _HANDLE, ctypes.c_size_t, _HANDLE, ctypes.c_size_t, _HANDLE, _HANDLE]


def _python_function(name: str, result: Any, arguments: list[Any]) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


class Library:
    """A loaded program: call it with tensors, get the tuple of its outputs.

    On a CUDA device calls share one instance, which loads its kernels in its first call: that one has to
    return before any other begins. From then on a call changes nothing that another one reads. Instances of
    their own would each load the kernels again, and query events, which a stream capture forbids.

    Args:
        path: the shared library; its bytes have been verified by the caller.
        device: ``"cpu"`` or ``"cuda:N"``.
        kernels: folder of the library's cubin files, None for the CPU.
        inputs: how many tensors a call takes.
        outputs: how many it returns.

    Attributes:
        path: of the shared library.

    Raises:
        HostError: the dynamic linker or the library's own set-up refused.
    """

    def __init__(
        self, path: Path, device: str, *, kernels: Path | None = None, inputs: int, outputs: int
    ) -> None:
        self.path = path
        try:
            self._lib = ctypes.CDLL(str(path))
        except OSError as error:
            raise HostError(
                f"the library {path.name} cannot be opened",
                found=error,
                remedy="run 'aotpack doctor'; if the folder forbids execution, set AOTPACK_CACHE to another",
            ) from error
        self._inputs, self._outputs = inputs, outputs
        self._arrays = ctypes.c_void_p * inputs, ctypes.c_void_p * outputs
        self._container = _HANDLE()
        create = self._lib.AOTInductorModelContainerCreateWithDevice
        create.argtypes = _CREATE
        folder = None if kernels is None else str(kernels).encode()
        instances, run = (INSTANCES, "Run") if kernels is None else (1, "RunSingleThreaded")
        self._check(create(ctypes.byref(self._container), instances, device.encode(), folder), "set up")
        weakref.finalize(self, self._lib.AOTInductorModelContainerDelete, self._container)
        self._check_counts()
        self._run = getattr(self._lib, f"AOTInductorModelContainer{run}")
        self._run.argtypes = _RUN
        self._alloc = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
        # The plural call frees the handles it takes over; the singular one leaks every output.
        self._steal = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
        self._pointer = _python_function(
            "PyCapsule_GetPointer", ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        )
        self._capsule = _python_function(
            "PyCapsule_New", ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        )

    def __call__(self, tensors: Sequence[Tensor], stream: int | None = None) -> list[Tensor]:
        """Runs the program. Tensors must have the shapes, dtypes and strides of the calling convention.

        Args:
            tensors: the inputs, contiguous, on the program's device.
            stream: the CUDA stream to launch on; None on the CPU.
        """
        handles = self._alloc(list(tensors))
        inputs = self._arrays[0](*[self._pointer(handle, None) for handle in handles])
        outputs = self._arrays[1]()
        code = self._run(self._container, inputs, self._inputs, outputs, self._outputs, stream, None)
        self._check(code, "run")
        result: list[Tensor] = self._steal([self._capsule(o, None, None) for o in outputs])
        return result

    def _check_counts(self) -> None:
        for name, expected in (("Inputs", self._inputs), ("Outputs", self._outputs)):
            count = ctypes.c_size_t()
            query = getattr(self._lib, f"AOTInductorModelContainerGetNum{name}")
            self._check(query(self._container, ctypes.byref(count)), "describe itself")
            if count.value != expected:
                raise HostError(
                    f"the library has {count.value} {name.lower()}, the manifest says {expected}",
                    remedy="build the package again",
                )

    def _check(self, code: int, action: str) -> None:
        if code == 0:
            return
        message = ctypes.c_char_p()
        # Libraries built by torch 2.14 have it; it writes to its argument and returns a code.
        if hasattr(self._lib, "AOTInductorGetLastError"):
            self._lib.AOTInductorGetLastError(ctypes.byref(message))
        raise AotpackError(
            f"a compiled program failed to {action}",
            found=(message.value or b"").decode(errors="replace")
            or f"error code {code}; the reason is on stderr",
            remedy="report it with the output of 'aotpack doctor --json'",
        )
