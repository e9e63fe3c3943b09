from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "examples" / "race.py"
SLEEP = "import time; time.sleep(600)"


@pytest.fixture(scope="module")
def race() -> ModuleType:
    spec = importlib.util.spec_from_file_location("race", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["race"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["race"]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_watchdog_ends_a_hang(race):
    code = "import os, threading; print(os.getpid(), flush=True); threading.Event().wait()"
    start = time.monotonic()
    watched = race.watch(python(code), timeout=1)
    assert watched.code is None
    assert not watched.busy
    assert time.monotonic() - start < 30
    assert not is_alive(int(watched.lines[0]))


def test_the_watchdog_ends_what_hides_from_signals_and_in_other_sessions(race):
    code = f"""
import os, signal, subprocess, sys, threading
signal.signal(signal.SIGABRT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
threading.Event().wait()
"""
    watched = race.watch(python(code), timeout=1)
    pids = [int(word) for word in watched.lines[0].split()]
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def test_work_is_told_from_a_hang(race):
    watched = race.watch(python("while True: pass"), timeout=1)
    assert watched.busy
    assert race.judge(watched, threads=1).outcome == "unfinished"


def test_a_hang_says_where_its_threads_were(race):
    code = """
import faulthandler, threading
faulthandler.enable()
def stuck():
    threading.Event().wait()
threading.Thread(target=stuck).start()
"""
    one = race.judge(race.watch(python(code), timeout=1), threads=2)
    assert one.outcome == "hung"
    assert len(one.places) == 2
    assert any("wait, " in place and "threading.py:" in place for place in one.places)


def test_a_command_that_ends_is_not_waited_for(race):
    watched = race.watch(python("print('done')"), timeout=60)
    assert (watched.code, watched.lines) == (0, ("done",))
    assert watched.seconds < 30


def events(*rows: dict[str, object]) -> tuple[str, ...]:
    return tuple(json.dumps(row) for row in ({"event": "start", "gradients": False}, *rows))


def watched(race, code: int | None, lines: tuple[str, ...], errors: str = ""):
    return race.Watched(code=code, busy=False, seconds=2.0, lines=lines, errors=errors)


def test_errors_of_threads_are_counted(race):
    called = {"event": "called", "thread": 0, "call": 0, "seconds": 1.5}
    raised = {"event": "raised", "thread": 1, "call": 0, "error": "RuntimeError: x"}
    one = race.judge(watched(race, 0, events(called, raised, raised)), threads=2)
    assert (one.outcome, one.calls, one.wanted, one.first_call_s) == ("raised", 1, 8, 1.5)
    assert one.errors == {"RuntimeError: x": 2}


def test_a_death_names_the_signal_or_the_last_words(race):
    assert race.judge(watched(race, -11, events()), threads=1).errors == {"SIGSEGV": 1}
    died = race.judge(watched(race, 1, (), "Traceback ...\nImportError: no torch\n"), threads=1)
    assert (died.outcome, died.errors) == ("died", {"ImportError: no torch": 1})


def test_a_real_race_ends_in_time_and_says_how(tmp_path):
    command = [sys.executable, PATH, "--threads", "2", "--rounds", "1", "--timeout", "8", "--json"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    data = json.loads(done.stdout)
    assert data["schema"] == "aotpack.example.race/1"
    assert data["rounds"][0]["outcome"] in {"finished", "raised", "died", "hung", "unfinished"}
    assert data["rounds"][0]["wanted"] == 8
    assert list(tmp_path.iterdir()) == []
