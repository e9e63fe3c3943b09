"""``aotpack.no_tracing``: while it is on, whatever traces or compiles raises, in whatever thread.

The only module that touches ``torch._dynamo.convert_frame.CatchErrorsWrapper``,
``torch._dynamo.symbolic_convert.InstructionTranslator``, ``torch.fx.Tracer.trace`` and
``torch.fx.experimental.proxy_tensor._MakefxTracer``, which stumbles over an error of ``Tracer.trace``; tried
with torch 2.11.0 and 2.14.1. It never imports ``torch._dynamo``: where that is imported later, a finder of
modules sees it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, NoReturn

import torch
from torch.fx import Tracer
from torch.fx.experimental import proxy_tensor

from aotpack.errors import HostError, TracingError

__all__ = ["Watch", "no_tracing"]

_DYNAMO: Final = "torch._dynamo.convert_frame"
_DYNAMO_CLASSES: Final = (
    # The root of every trace; frames that are inlined into one have a class of their own.
    ("torch._dynamo.symbolic_convert", "InstructionTranslator", "__init__"),
    # What the interpreter calls for a frame; it may swallow what was raised below it.
    (_DYNAMO, "CatchErrorsWrapper", "__call__"),
)
_KEPT: Final = 16

_lock: Final = threading.RLock()
_watches: Final[list[Watch]] = []
_undo: Final[list[Callable[[], None]]] = []
_thread: Final = threading.local()


class Watch:
    """What one ``no_tracing`` refused.

    Attributes:
        count: traces and compilations that were refused, in all threads.
        errors: the first 16 of the errors that were raised, in the order of their threads' calls.
    """

    def __init__(self) -> None:
        self.count = 0
        self.errors: tuple[TracingError, ...] = ()

    def __repr__(self) -> str:
        return f"<aotpack watch: {self.count} refused>"


@contextlib.contextmanager
def no_tracing() -> Iterator[Watch]:
    """Proof that a trainer does not trace: while it is on, a dynamo compile or an FX trace raises.

    In any thread, wherever it was started, and also where dynamo is first imported inside. What torch
    compiled before runs on; a recompilation is refused. May be nested: each counts what happens while it is
    on. At the end torch is as it was.

    Yields:
        A ``Watch``; its ``count`` stays 0.

    Raises:
        TracingError: in the thread that would have traced, with its stack.
        HostError: this torch has not the functions by which a trace is seen.
    """
    watch = Watch()
    with _lock:
        if not _watches:
            _install()
        _watches.append(watch)
    try:
        yield watch
    finally:
        with _lock:
            _watches.remove(watch)
            if not _watches:
                _uninstall()


def _refuse(what: str) -> NoReturn:
    thread = threading.current_thread().name
    stack = "".join(traceback.format_stack(sys._getframe(2)))
    error = TracingError(
        f"{what} was about to begin in thread {thread!r}, inside aotpack.no_tracing()",
        expected="no trace and no compilation",
        found=f"a call from\n{stack.rstrip()}",
        remedy="take what is compiled there out of the trainer, or call it once before no_tracing()",
    )
    with _lock:
        for watch in _watches:
            watch.count += 1
            watch.errors = (*watch.errors, error)[:_KEPT]
    _thread.refused = error
    raise error


def _install() -> None:
    try:
        for owner, method in ((Tracer, "trace"), (proxy_tensor._MakefxTracer, "_trace_inner")):
            _replace(owner, method, _tracing("an FX trace"))
        if _DYNAMO in sys.modules:
            _watch_dynamo()
        else:
            finder = _Finder()
            sys.meta_path.insert(0, finder)
            _undo.append(lambda: sys.meta_path.remove(finder))
    except BaseException:
        _uninstall()
        raise


def _uninstall() -> None:
    while _undo:
        _undo.pop()()


def _watch_dynamo() -> None:
    for (module, name, method), wrapper in zip(
        _DYNAMO_CLASSES, (_tracing("a compilation by dynamo"), _raising), strict=True
    ):
        _replace(getattr(sys.modules.get(module), name, None), method, wrapper)


def _replace(owner: type | None, name: str, wrapper: Callable[[Any], Any]) -> None:
    original = vars(owner).get(name) if owner is not None else None
    if original is None:
        raise HostError(
            "aotpack.no_tracing() does not know this torch",
            expected=f"a class {owner.__name__ if owner else ''} with its own {name}",
            found=f"torch {torch.__version__} without it",
            remedy="use a torch that aotpack supports, or train without the proof",
        )
    setattr(owner, name, wrapper(original))
    _undo.append(lambda: setattr(owner, name, original))


def _tracing(what: str) -> Callable[[Any], Any]:
    """A wrapper of a function that begins a trace."""

    def wrapper(original: Any) -> Any:
        @functools.wraps(original)
        def refused(*args: Any, **kwargs: Any) -> Any:
            # A thread may have come here just before the last watch ended.
            return _refuse(what) if _watches else original(*args, **kwargs)

        return refused

    return wrapper


def _raising(original: Any) -> Any:
    """A wrapper of dynamo's outermost function, which turns our error into others or into a warning."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        _thread.refused = None
        try:
            result = original(*args, **kwargs)
        except Exception:
            if _thread.refused is None:
                raise
            result = None
        error, _thread.refused = _thread.refused, None
        if error is not None:
            raise error
        return result

    return call


class _Finder(MetaPathFinder):
    """Sees dynamo being imported for the first time."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _DYNAMO:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Loads dynamo as its own loader does, then watches it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with _lock:
            if _watches:
                _watch_dynamo()
