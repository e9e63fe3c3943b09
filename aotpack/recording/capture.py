"""``aotpack.capture``: runs a model once and turns every flex_attention call into a spec."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from aotpack.errors import SpecError
from aotpack.recording.calls import Recorder
from aotpack.recording.interception import intercepted
from aotpack.recording.result import Captured, named

__all__ = ["capture"]


def capture(
    model: Callable[..., Any], /, *inputs: Any, static_numbers: Collection[str] = (), **arguments: Any
) -> Captured:
    """Runs a function or module once and returns the specs of every flex_attention call in it.

    The call is the caller's own: gradients are as they are set, a training step may run its backward, and
    state that the model changes is changed. Compiled parts run eagerly. Attention is answered with dense
    math, so small inputs are best; on fake or meta tensors with shapes alone. Lengths that differ from each
    other and from the rule's own numbers tell the most. Nothing else in the process may use flex_attention
    at the same time.

    A tensor that a mask or score function closes over becomes an input of the spec, under the variable's
    name. A Python number becomes part of the rule, and is refused where it would change from step to step.

    Args:
        model: what to run.
        inputs: its arguments.
        static_numbers: names of Python numbers in mask and score functions that may differ from call to
            call, or equal a length, because each of their values is to be a spec of its own.
        arguments: its keyword arguments.

    Raises:
        SpecError: no flex_attention was called; a mask or score function computes what cannot be recorded; a
            Python number in one changes from step to step; a call asks for what aotpack does not do.
        UnsupportedError: a capture is running already.
        HostError: this torch's flex_attention cannot be recorded.
    """
    recorder = Recorder(static_numbers)
    with intercepted(recorder.answer):
        model(*inputs, **arguments)
    if not recorder.found:
        raise SpecError(
            "the model called no flex_attention",
            expected="at least one call of torch.nn.attention.flex_attention.flex_attention",
            found="none",
            remedy='have it use flex_attention, for example attn_implementation="flex_attention"',
        )
    specs = named([spec for spec, _ in recorder.found])
    names = {spec: name for name, spec in specs.items()}
    calls = tuple(replace(call, spec=names[spec]) for spec, call in recorder.found)
    return Captured(specs=specs, calls=calls)
