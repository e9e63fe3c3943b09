"""Forward and backward graphs of a spec's attention on the CPU: block-sparse kernels, or chunks of rows."""

from __future__ import annotations

from aotpack.build.export import Graph, differentiate, trace
from aotpack.build.programs import attention_program
from aotpack.build.programs_scored import backward_program, forward_program
from aotpack.build.sinks import with_sinks
from aotpack.scores import family_of
from aotpack.spec import AttentionSpec

__all__ = ["attention_graphs", "is_chunked"]


def is_chunked(spec: AttentionSpec) -> bool:
    """Whether a rule changes the scores, which the block-sparse kernels cannot do."""
    return spec.score is not None and family_of(spec.score).rule is not None


def attention_graphs(spec: AttentionSpec) -> tuple[Graph, Graph]:
    """Forward and backward."""
    if is_chunked(spec):
        return trace(forward_program(spec)), trace(backward_program(spec))
    return with_sinks(spec, *differentiate(attention_program(spec)))
