"""Mask and score rules of a user's own: functions that a spec names as ``"module:function"``.

A mask rule is ``rule(b, h, q_idx, kv_idx, **tensors) -> bool tensor`` and a score rule
``rule(score, b, h, q_idx, kv_idx, **tensors) -> tensor``, as torch's flex_attention has them; the tensors are
those that the spec, or the function itself under ``inputs``, declares. A mask rule may also ask for
``query_len`` and ``key_len``. It is traced when a package is built and never called afterwards::

    @aotpack.inputs(segments=("int64", "B", "K"))
    def same_segment(b, h, q_idx, kv_idx, segments):
        return segments[b, q_idx] == segments[b, kv_idx]
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Final, TypeVar

from aotpack.errors import SpecError
from aotpack.spec import AttentionSpec, MaskSpec, ScoreSpec, TensorInput

__all__ = [
    "check_places",
    "folders",
    "function_of",
    "importable",
    "inputs",
    "reference",
    "resolve",
    "source_digest",
]

_DECLARED: Final = "__aotpack_inputs__"
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Rule = TypeVar("_Rule", MaskSpec, ScoreSpec)


def inputs(**tensors: TensorInput | tuple[Any, ...]) -> Callable[[_Function], _Function]:
    """Declares the tensors that a rule reads, by the names of its arguments.

    Args:
        tensors: ``(dtype, *axes)``, for example ``("int64", "B", "K")``, or a ``TensorInput``, whose
            ``gradient`` may be true in a score rule.
    """
    declared = tuple(
        replace(given, name=name)
        if isinstance(given, TensorInput)
        else TensorInput(name=name, dtype=given[0], dims=tuple(given[1:]))
        for name, given in tensors.items()
    )

    def mark(function: _Function) -> _Function:
        setattr(function, _DECLARED, declared)
        return function

    return mark


def reference(function: Callable[..., Any]) -> str:
    """``"module:function"`` of a function at the top of a module.

    Raises:
        SpecError: a function that no such name finds: a lambda, a closure, or one of ``__main__``.
    """
    name, module = getattr(function, "__qualname__", repr(function)), getattr(function, "__module__", None)
    if module in (None, "__main__") or not name.isidentifier():
        raise SpecError(
            f"the rule {name} cannot be named",
            expected="a function at the top of a module that can be imported",
            found=f"{module}:{name}",
            remedy="move it to a module, or record it with aotpack.capture",
        )
    return f"{module}:{name}"


def function_of(name: str, source: str | None = None) -> Callable[..., Any]:
    """The function that ``"module:function"`` names.

    Args:
        name: of the function.
        source: digest that its source must have.

    Raises:
        SpecError: it cannot be imported, is no function, or has changed.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(
            f"the rule '{name}' cannot be imported",
            expected="module:function, importable where the package is built",
            found=str(error),
            remedy="check the name, and that its folder is on PYTHONPATH",
        ) from error
    if not inspect.isfunction(found):
        raise SpecError(f"the rule '{name}' is no function", expected="a function", found=repr(found))
    if found.__name__ == "<lambda>" or found.__closure__ is not None:
        kind = "a lambda" if found.__name__ == "<lambda>" else f"the closure {found.__qualname__}"
        raise SpecError(
            f"the rule '{name}' is {kind}",
            expected="a function that is defined at the top of its module",
            remedy="write it with def, and pass what it closes over as tensors or constants of the module",
        )
    if source is not None and (now := source_digest(found)) != source:
        raise SpecError(
            f"the rule '{name}' has changed since its spec was made",
            expected=f"source with digest {source[:16]}",
            found=now[:16],
            remedy="make the spec again",
        )
    return found


def source_digest(function: Callable[..., Any]) -> str:
    """SHA-256 of a function's source, of the functions of its package that it calls, and of the constants
    of their modules that they read.

    Raises:
        SpecError: there is no source, or it reads a closure or global that is no plain constant.
    """
    digest = hashlib.sha256()
    for part in _parts(function, set()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


@contextlib.contextmanager
def importable(*places: Path) -> Iterator[None]:
    """Modules in these folders can be imported meanwhile, and come before others of their name."""
    added = [str(place.resolve()) for place in places]
    sys.path[:0] = added
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for place in added:
            with contextlib.suppress(ValueError):
                sys.path.remove(place)


def folders(spec: AttentionSpec) -> tuple[str, ...]:
    """The folders in which the modules of a resolved spec's own rules were found."""
    modules = [sys.modules[rule.family.partition(":")[0]] for rule in _own_rules(spec)]
    return tuple(
        str(Path(module.__file__).resolve().parents[module.__name__.count(".") + hasattr(module, "__path__")])
        for module in modules
        if module.__file__ is not None
    )


def check_places(spec: AttentionSpec) -> None:
    """Refuses a module that was imported before from elsewhere, as when two spec files name theirs alike.

    Raises:
        SpecError: an import now would find another module than the one that is loaded.
    """
    for top in {rule.family.partition(":")[0].partition(".")[0] for rule in _own_rules(spec)}:
        loaded, here = sys.modules[top].__spec__, PathFinder.find_spec(top)
        if loaded is not None and here is not None and _places(loaded).isdisjoint(_places(here)):
            raise SpecError(
                f"two modules are named '{top}'",
                expected=", ".join(map(str, sorted(_places(here)))),
                found=", ".join(map(str, sorted(_places(loaded)))) + ", which was imported before",
                remedy="rename one, or build from a process of its own",
            )


def resolve(spec: AttentionSpec, *, anew: bool = True, block_size: int | None = None) -> AttentionSpec:
    """A spec whose rules of the user's own have their tensors and source digest filled in.

    Args:
        spec: with rules of any kind.
        anew: also look at rules that have a source digest, which must not have changed; without it, they are
            taken as they are, and need not be importable.
        block_size: of mask rules that draft and do not say theirs.

    Raises:
        SpecError: a rule cannot be imported, has changed, declares no tensor for one of its arguments, or
            drafts without a block size.
    """
    if not any(anew or rule.source is None for rule in _own_rules(spec)):
        return spec
    score = None if spec.score is None else _resolved(spec.score, 5, anew)
    return replace(spec, mask=_drafting(_resolved(spec.mask, 4, anew), block_size), score=score)


def _own_rules(spec: AttentionSpec) -> list[MaskSpec | ScoreSpec]:
    rules = [*spec.mask.leaves(), *(spec.score.leaves() if spec.score is not None else ())]
    return [rule for rule in rules if rule.own]


def _resolved(rule: _Rule, first: int, anew: bool) -> _Rule:
    if rule.parts is not None:
        return replace(rule, parts=tuple(_resolved(part, first, anew) for part in rule.parts))
    if not rule.own or (rule.source is not None and not anew):
        return rule
    function = function_of(rule.family, rule.source)
    declared = rule.inputs if rule.inputs is not None else getattr(function, _DECLARED, ())
    _check_signature(rule.family, function, first, {given.name for given in declared})
    return replace(rule, inputs=tuple(declared) or None, source=source_digest(function))


def _drafting(mask: MaskSpec, block_size: int | None) -> MaskSpec:
    if mask.parts is not None:
        return replace(mask, parts=tuple(_drafting(part, block_size) for part in mask.parts))
    if not mask.own or mask.block_size or not any("N" in given.dims for given in mask.inputs or ()):
        return mask
    if block_size is None:
        raise SpecError(
            f"the rule '{mask.family}' drafts, as a tensor of it has the axis 'N', and has no block size",
            expected="block_size, the query rows of one anchor",
            remedy="say block_size in the mask, or rename the axis",
        )
    return replace(mask, block_size=block_size)


def _places(spec: ModuleSpec) -> set[Path]:
    found = [spec.origin] if spec.has_location else spec.submodule_search_locations
    return {Path(place).resolve() for place in found or () if place}


def _check_signature(name: str, function: Callable[..., Any], first: int, declared: set[str]) -> None:
    arguments = list(inspect.signature(function).parameters)
    optional = {"query_len", "key_len"} if first == 4 else set()
    if len(arguments) < first or not declared <= set(arguments[first:]) <= declared | optional:
        before = "" if first == 4 else "score, "
        raise SpecError(
            f"the rule '{name}' has the wrong arguments",
            expected=f"{before}b, h, q_idx, kv_idx, then " + (", ".join(sorted(declared)) or "nothing more"),
            found=", ".join(arguments),
            remedy="declare each tensor it reads with @aotpack.inputs or in the spec",
        )


def _parts(function: Callable[..., Any], seen: set[str]) -> Iterator[str]:
    name = f"{function.__module__}.{function.__qualname__}"
    if name in seen:
        return
    seen.add(name)
    try:
        yield name
        yield inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise SpecError(f"the rule {name} has no source", expected="a Python function in a file") from error
    read = inspect.getclosurevars(function)
    for key, value in sorted({**read.nonlocals, **read.globals}.items()):
        yield from _read(name, key, value, seen)


def _read(function: str, name: str, value: Any, seen: set[str]) -> Iterator[str]:
    if value is None or isinstance(value, bool | int | float | str):
        yield f"{name} = {value!r}"
    elif inspect.isfunction(value):
        # Libraries are pinned by the build's record of their versions.
        if value.__module__.partition(".")[0] == function.partition(".")[0]:
            yield from _parts(value, seen)
        else:
            yield f"{name} = {value.__module__}.{value.__qualname__}"
    elif isinstance(value, types.ModuleType):
        yield f"{name} = module {value.__name__}"
    elif callable(value) or isinstance(value, type):
        kind = value if hasattr(value, "__qualname__") else type(value)
        yield f"{name} = {kind.__module__}.{kind.__qualname__}"
    else:
        raise SpecError(
            f"the rule {function} reads '{name}'",
            expected="a constant: a number, a string or a truth value",
            found=type(value).__name__,
            remedy=f"pass it: declare '{name}' as a tensor input",
        )
