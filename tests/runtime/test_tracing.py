"""no_tracing: what traces or compiles raises in its own thread, and torch is left as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch.fx.experimental.proxy_tensor import _MakefxTracer, make_fx

import aotpack
from aotpack.errors import TracingError
from aotpack.runtime import tracing
from tests.cases import make_case, run


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def compiled(**options: object) -> Callable[[torch.Tensor], torch.Tensor]:
    torch.compiler.reset()
    return torch.compile(double, backend="eager", **options)


def in_thread(call: Callable[[], object]) -> BaseException | None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            raised.append(error)

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def hooked() -> list[object]:
    """Every function that no_tracing replaces, as it is now."""
    classes = [getattr(sys.modules[module], name) for module, name, _ in tracing._DYNAMO_CLASSES]
    methods = [method for *_, method in tracing._DYNAMO_CLASSES]
    return [
        torch.fx.Tracer.trace,
        _MakefxTracer._trace_inner,
        *map(getattr, classes, methods),
        *sys.meta_path,
    ]


def test_eager_work_and_attention_are_no_trace(float32_pack):
    attend = float32_pack.attention("full")
    case = make_case(attend.spec, 1, 70, 3)
    with aotpack.no_tracing() as watch:
        torch.ones(3, requires_grad=True).sum().backward()
        run(attend, case)
    assert (watch.count, watch.errors) == (0, ())


@pytest.mark.parametrize(
    "trace",
    [
        lambda: torch.fx.symbolic_trace(double),
        lambda: make_fx(double)(torch.ones(2)),
        lambda: torch.export.export(torch.nn.ReLU(), (torch.ones(2),)),
        lambda: torch._dynamo.explain(double)(torch.ones(2)),
        lambda: compiled(fullgraph=True)(torch.ones(2)),
        lambda: compiled(fullgraph=False)(torch.ones(2)),
    ],
    ids=["symbolic_trace", "make_fx", "export", "explain", "compile-fullgraph", "compile"],
)
def test_a_trace_raises_with_its_stack_and_is_counted(trace):
    with aotpack.no_tracing() as watch:
        with pytest.raises(TracingError, match=r"in thread 'MainThread'(.|\n)*test_tracing\.py"):
            trace()
        assert watch.count == len(watch.errors) == 1
        error = in_thread(trace)
    assert isinstance(error, TracingError)
    assert "thread 'worker'" in str(error)
    assert watch.count == 2


def test_errors_that_dynamo_would_swallow_are_raised():
    call = compiled()
    with (
        torch._dynamo.config.patch(suppress_errors=True),
        aotpack.no_tracing() as watch,
        pytest.raises(TracingError),
    ):
        call(torch.ones(2))
    assert watch.count == 1


def test_what_is_compiled_runs_and_a_recompilation_is_refused():
    call = compiled(dynamic=False)
    call(torch.ones(2))
    with aotpack.no_tracing() as watch:
        assert call(torch.ones(2)).tolist() == [2, 2]
        assert watch.count == 0
        with pytest.raises(TracingError):
            call(torch.ones(3))
    assert call(torch.ones(3)).tolist() == [2, 2, 2]


def test_nested_watches_count_what_happens_while_they_are_on():
    with aotpack.no_tracing() as outer:
        with aotpack.no_tracing() as inner, pytest.raises(TracingError):
            make_fx(double)(torch.ones(2))
        with pytest.raises(TracingError):
            make_fx(double)(torch.ones(2))
    assert (inner.count, outer.count) == (1, 2)


def test_torch_is_left_as_it_was_also_after_an_error():
    before = hooked()

    def fail() -> None:
        assert all(now is not then for now, then in zip(hooked()[:4], before[:4], strict=True))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), aotpack.no_tracing():
        fail()
    assert hooked() == before
    assert compiled()(torch.ones(2)).tolist() == [2, 2]


def test_threads_that_enter_and_leave_at_will():
    before, ready = hooked(), threading.Barrier(4)
    failures: list[BaseException | None] = []

    def work() -> None:
        ready.wait()
        for _ in range(50):
            with aotpack.no_tracing() as watch:
                with pytest.raises(TracingError):
                    torch.fx.symbolic_trace(double)
                assert watch.count >= 1

    threads = [threading.Thread(target=lambda: failures.append(in_thread(work))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [None] * 4
    assert hooked() == before


LATER = """
import sys, torch, aotpack
from aotpack.errors import TracingError

def double(x):
    return x + x

finders = list(sys.meta_path)
with aotpack.no_tracing() as watch:
    assert "torch._dynamo" not in sys.modules
    try:
        torch.compile(double, backend="eager")(torch.ones(2))
    except TracingError:
        pass
    assert "torch._dynamo.convert_frame" in sys.modules
    assert watch.count == 1, watch
convert = sys.modules["torch._dynamo.convert_frame"]
assert type(convert.__loader__) is type(convert.__spec__.loader) is type(torch.__loader__)
assert sys.meta_path == finders
assert torch.compile(double, backend="eager")(torch.ones(2)).tolist() == [2, 2]
print("seen", torch.__version__)
"""


@pytest.mark.parametrize("python", [sys.executable, os.environ.get("AOTPACK_TEST_TORCH211", sys.executable)])
def test_dynamo_is_seen_where_it_is_imported_inside(python):
    source = str(Path(__file__).parents[2])
    done = subprocess.run(
        [python, "-c", LATER], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source}
    )
    assert done.stdout.startswith("seen"), done.stderr
