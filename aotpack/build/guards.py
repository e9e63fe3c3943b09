"""What Inductor takes for granted about sizes while it compiles.

Compiled ahead of time, nothing checks such an assumption when the program runs; one that the declared shapes
do not imply would give wrong results without a word. Tried with torch 2.14.1.
"""

from __future__ import annotations

from typing import Any, Final

import sympy  # type: ignore[import-untyped]

from aotpack.build.export import Graph

__all__ = ["count_guards", "undeclared_guards"]

_INT32: Final = (1 << 31) - 1
_BLOCK: Final = 128


def count_guards(graph: Graph) -> int:
    """How many assumptions about a graph's sizes are noted so far."""
    return len(_environment(graph).guards)


def undeclared_guards(graph: Graph, since: int, *, narrow: bool) -> list[str]:
    """Assumptions noted after the first ``since``, but for those that hold or do not matter."""
    guards = _environment(graph).guards[since:]
    return [str(guard.expr) for guard in guards if not _harmless(guard.expr, narrow)]


def _harmless(guard: Any, narrow: bool) -> bool:
    if narrow and isinstance(guard, sympy.LessThan) and guard.rhs == _INT32:
        return True
    # Which attention template short queries take; FORCE_USE_FLEX_ATTENTION decides it for all.
    return isinstance(guard, sympy.GreaterThan) and guard.lhs.is_Symbol and guard.rhs == _BLOCK


def _environment(graph: Graph) -> Any:
    return graph.args[0].fake_mode.shape_env
