"""Parts of a build side by side: order, failures, and folders of their own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from aotpack.build import worker
from aotpack.build.parallel import side_by_side
from aotpack.errors import BuildError, UnsupportedError


def test_results_come_in_the_tasks_order_from_processes_of_their_own(tmp_path):
    def task(number):
        time.sleep(0.2 if number == 0 else 0)
        return number, os.getpid(), os.environ["TORCHINDUCTOR_CACHE_DIR"]

    found = side_by_side([lambda n=n: task(n) for n in range(4)], tmp_path, 2)
    assert [number for number, _, _ in found] == [0, 1, 2, 3]
    assert len({pid for _, pid, _ in found} | {os.getpid()}) == 5
    assert [folder for _, _, folder in found] == [str(tmp_path / f"part-{n}" / "inductor") for n in range(4)]


def test_no_more_than_the_jobs_run_at_a_time(tmp_path):
    def task(number):
        (tmp_path / f"{number}.begun").touch()
        time.sleep(0.1)
        begun = len(list(tmp_path.glob("*.begun")))
        (tmp_path / f"{number}.begun").unlink()
        return begun

    found = side_by_side([lambda n=n: task(n) for n in range(5)], tmp_path, 2)
    assert max(found) == 2


def test_an_error_of_ours_stops_the_others(tmp_path):
    def fails():
        raise UnsupportedError("no kernel fits", expected="less", found="more", remedy="smaller heads")

    started = time.monotonic()
    with pytest.raises(UnsupportedError, match="no kernel fits") as caught:
        side_by_side([lambda: time.sleep(60), fails], tmp_path, 2)
    assert caught.value.diagnostics() == {"expected": "less", "found": "more", "what to do": "smaller heads"}
    assert time.monotonic() - started < 30


def test_another_exception_is_on_stderr_and_ends_the_worker(tmp_path, capfd):
    def fails():
        raise RuntimeError("the compiler's own words")

    with pytest.raises(SystemExit) as caught:
        side_by_side([fails], tmp_path, 1)
    assert caught.value.code == 1
    assert "RuntimeError: the compiler's own words" in capfd.readouterr().err


def test_a_killed_part_is_named(tmp_path):
    with pytest.raises(BuildError, match="a process of the build died") as caught:
        side_by_side([lambda: os.kill(os.getpid(), signal.SIGKILL)], tmp_path, 1)
    assert caught.value.found == "exit code -9"
    assert "fewer jobs" in caught.value.remedy


def test_programs_are_started_at_the_same_addresses_where_the_system_lets_them():
    code = (
        "import subprocess\n"
        "from aotpack.build.parallel import fixed_addresses\n"
        "fixed = fixed_addresses()\n"
        "read = ['grep', '-m1', 'stack', '/proc/self/maps']\n"
        "same = subprocess.check_output(read) == subprocess.check_output(read)\n"
        "personality = int(subprocess.check_output(['cat', '/proc/self/personality']), 16)\n"
        "print(fixed, same, bool(personality & 0x0040000))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout in ("True True True\n", "False False False\n"), done.stderr


def test_what_a_part_says_is_one_write_whatever_the_stream(monkeypatch):
    # Packets of a pipe are single writes; another part's may come between two.
    read, write = os.pipe2(os.O_DIRECT)
    unbuffered = io.TextIOWrapper(os.fdopen(write, "wb", 0), write_through=True)  # as PYTHONUNBUFFERED has it
    with unbuffered, os.fdopen(read, "rb", 0) as packets:
        monkeypatch.setattr(worker, "_progress", unbuffered, raising=False)
        worker._say(stage="forward", spec="full", seconds=1.5)
        said = packets.read(4096)
    assert said.endswith(b"}\n")
    assert json.loads(said) == {"stage": "forward", "spec": "full", "seconds": 1.5}
