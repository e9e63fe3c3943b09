"""What drafter threads meet without a package: torch.compile(flex_attention) called from several threads.

    python examples/race.py --threads 3 --rounds 2 --timeout 120
    python examples/race.py --device cuda --json

Every round is a fresh process with an empty compile cache. Its threads call one compiled flex_attention on
DFlash masks whose lengths change from call to call, as a trainer's do. A watchdog ends the round at the
timeout, compilers included. Whatever happened is printed:

- finished: all calls returned;
- raised: some raised an error;
- died: the process ended by itself, by a signal for example;
- hung: it was ended at the timeout, and no longer used the processor;
- unfinished: it was ended at the timeout, and still worked.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = "aotpack.example.race/1"
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 14, 2, 64, 16
CALLS = 4


@dataclass(frozen=True, kw_only=True)
class Watched:
    """How a command ended.

    Attributes:
        code: its exit status, -N for signal N; None when the watchdog ended it.
        busy: whether it was using the processor when the watchdog ended it.
        seconds: until then.
        lines: what it wrote to stdout.
        errors: what it wrote to stderr.
    """

    code: int | None
    busy: bool
    seconds: float
    lines: tuple[str, ...]
    errors: str


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of the race.

    Attributes:
        outcome: "finished", "raised", "died", "hung" or "unfinished".
        seconds: until all threads had ended, or until the watchdog ended them.
        first_call_s: from the start of the threads to the first result of any; None without one.
        calls: calls that returned, of all threads.
        wanted: calls that should have.
        gradients: whether backward was part of a call.
        errors: how often each error was raised.
        places: the innermost Python frame of each thread, when the process did not end in order.
    """

    outcome: str
    seconds: float
    first_call_s: float | None
    calls: int
    wanted: int
    gradients: bool
    errors: dict[str, int]
    places: tuple[str, ...]


def watch(command: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None) -> Watched:
    """Run a command; at the timeout end it and everything it started.

    Args:
        command: program and arguments.
        timeout: in seconds.
        environment: of the command; this process's own by default.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, stdin=subprocess.DEVNULL)
        code, busy, seconds = None, False, timeout
        try:
            code = process.wait(timeout)
            seconds = time.monotonic() - start
        except subprocess.TimeoutExpired:
            busy = _is_busy(process.pid)
        finally:
            _end(process, ask_first=code is None)
        out.seek(0)
        err.seek(0)
        lines, errors = (file.read().decode(errors="replace") for file in (out, err))
        return Watched(code=code, busy=busy, seconds=seconds, lines=tuple(lines.splitlines()), errors=errors)


def _is_busy(pid: int) -> bool:
    """Whether a process or one below it uses more than a twentieth of a processor in the next two seconds."""
    before = sum(_tree(pid).values())
    time.sleep(2)
    return (sum(_tree(pid).values()) - before) / os.sysconf("SC_CLK_TCK") > 2 / 20


def _tree(root: int) -> dict[int, int]:
    """A process and those below it, in sessions of their own too, with their CPU time in clock ticks."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            children.setdefault(int(fields[1]), []).append(pid)
            ticks[pid] = sum(map(int, fields[11:15]))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return {pid: ticks.get(pid, 0) for pid in found}


def _end(process: subprocess.Popen[bytes], *, ask_first: bool) -> None:
    """End a process and those below it; ``ask_first`` lets a racer print where its threads are."""
    everything = _tree(process.pid) if process.poll() is None else ()
    if ask_first:
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    for pid in everything:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def run_round(threads: int, timeout: float, device: str) -> Round:
    """One round in a fresh process with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TMPDIR": folder,
        }
        command = [sys.executable, __file__, "--racer", "--threads", str(threads), "--device", device]
        return judge(watch(command, timeout, environment), threads)


def judge(watched: Watched, threads: int) -> Round:
    """What a racer's exit and its lines, JSON events, mean."""
    events = [json.loads(line) for line in watched.lines if line.startswith("{")]
    calls = [event["seconds"] for event in events if event["event"] == "called"]
    errors = collections.Counter(event["error"] for event in events if event["event"] == "raised")
    if watched.code is None:
        outcome = "unfinished" if watched.busy else "hung"
    elif watched.code:
        outcome = "died"
        errors[last_words(watched)] += 1
    else:
        outcome = "raised" if errors else "finished"
    return Round(
        outcome=outcome,
        seconds=round(watched.seconds, 2),
        first_call_s=min(calls, default=None),
        calls=len(calls),
        wanted=threads * CALLS,
        gradients=any(event["event"] == "start" and event["gradients"] for event in events),
        errors=dict(errors),
        places=tuple(innermost(watched.errors)) if watched.code is None or watched.code < 0 else (),
    )


def last_words(watched: Watched) -> str:
    """Why a process died: the signal or the last line of its traceback."""
    assert watched.code is not None
    if watched.code < 0:
        return signal.Signals(-watched.code).name
    return watched.errors.strip().rpartition("\n")[2] or f"exit status {watched.code}"


def innermost(dump: str) -> list[str]:
    """``function, file:line`` of each thread in what faulthandler wrote."""
    lines = [line.strip() for line in dump.splitlines()]
    frames = [
        following
        for line, following in itertools.pairwise(lines)
        if line.startswith(("Thread 0x", "Current thread 0x")) and following.startswith("File ")
    ]
    return [_frame(frame) for frame in frames]


def _frame(line: str) -> str:
    place, _, function = line.removeprefix("File ").rpartition(" in ")
    path, _, number = place.replace('"', "").partition(", line ")
    return f"{function}, {'/'.join(Path(path).parts[-3:])}:{number}"


def race(threads: int, device: str) -> None:
    """The racer: all threads call one compiled flex_attention; an event on stdout for all that happens."""
    import faulthandler

    import torch
    from torch.nn.attention.flex_attention import flex_attention

    faulthandler.enable()
    gradients = _has_gradients(device)
    compiled = torch.compile(flex_attention)
    together = threading.Barrier(threads)
    _say(event="start", torch=torch.__version__, gradients=gradients)

    def run(rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        together.wait()
        start = time.monotonic()
        for call in range(CALLS):
            try:
                _call(compiled, gradients, torch.device(device), generator)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
                text = (str(error).strip() or "no message").splitlines()[0]
                _say(event="raised", thread=rank, call=call, error=f"{type(error).__name__}: {text[:160]}")
            else:
                _say(event="called", thread=rank, call=call, seconds=round(time.monotonic() - start, 2))

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _call(compiled: Any, gradients: bool, device: Any, generator: Any) -> None:
    """One attention on a DFlash mask with a random number of anchors over a random context."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    anchors_count, context = (
        int(torch.randint(*bounds, (), generator=generator)) for bounds in ((8, 48), (128, 384))
    )
    anchors = torch.randint(context, (1, anchors_count), generator=generator).sort().values.to(device)
    rows = anchors_count * BLOCK

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        before_anchor = (kv < context) & (kv < anchors[b, q // BLOCK])
        return before_anchor | ((kv >= context) & ((kv - context) // BLOCK == q // BLOCK))

    def draw(heads: int, length: int) -> Any:
        values = torch.randn(1, heads, length, HEAD_DIM, generator=generator).to(device, torch.bfloat16)
        return values.requires_grad_(gradients)

    mask = create_block_mask(visible, B=1, H=None, Q_LEN=rows, KV_LEN=context + rows, device=str(device))
    q, k, v = draw(HEADS, rows), draw(KV_HEADS, context + rows), draw(KV_HEADS, context + rows)
    out = compiled(q, k, v, block_mask=mask, enable_gqa=True)
    if gradients:
        out.sum().backward()


def _has_gradients(device: str) -> bool:
    """Whether torch differentiates flex_attention there; where it refuses, it does so before it traces."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    if not device.startswith("cpu"):
        return True
    q = torch.zeros(1, 1, 1, HEAD_DIM, requires_grad=True)
    try:
        flex_attention(q, q, q)
    except NotImplementedError:
        return False
    return True


def _say(**event: Any) -> None:
    # One write for each line: threads share stdout, and a hang must not hold back what was said before.
    os.write(1, (json.dumps(event) + "\n").encode())


def table(rounds: Sequence[Round]) -> str:
    """The rounds, one a line, then what was raised and where threads were stuck."""
    lines = [f"{'round':<7}{'outcome':<10}{'calls':>9}{'first call':>12}{'ended':>9}"]
    for number, one in enumerate(rounds, start=1):
        first = "-" if one.first_call_s is None else f"{one.first_call_s:.1f} s"
        calls, ended = f"{one.calls}/{one.wanted}", f"{one.seconds:.1f} s"
        lines.append(f"{number:<7}{one.outcome:<10}{calls:>9}{first:>12}{ended:>9}")
        lines += [f"       {count} x {error}" for error, count in one.errors.items()]
        lines += [f"       a thread was in {place}" for place in one.places]
    return "\n".join(lines)


def main() -> None:
    """Run the rounds and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=3, help="threads that call at once (default 3)")
    parser.add_argument("--rounds", type=int, default=2, help="fresh processes (default 2)")
    parser.add_argument("--timeout", type=float, default=180, help="seconds until a round is ended (180)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--racer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.racer:
        race(options.threads, options.device)
        return
    from importlib.metadata import version

    rounds = [run_round(options.threads, options.timeout, options.device) for _ in range(options.rounds)]
    what = "forward and backward" if any(one.gradients for one in rounds) else "forward only"
    if options.json:
        facts = {
            "torch": version("torch"),
            "device": options.device,
            "threads": options.threads,
            "what": what,
        }
        print(json.dumps({"schema": SCHEMA, **facts, "rounds": [asdict(one) for one in rounds]}, indent=2))
    else:
        print(
            f"torch.compile(flex_attention), torch {version('torch')}, {options.threads} threads on", end=" "
        )
        print(f"{options.device}, {what}")
        print(table(rounds))


if __name__ == "__main__":
    main()
