"""A lock is held by one process or thread at a time, and by nobody who has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from aotpack.store.locks import locked

HOLD = """
import pathlib, sys, time
from aotpack.store.locks import locked

with locked(pathlib.Path(sys.argv[1]), 0):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of ``tmp_path / "lock"``."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_another_process_does_not_get_it(holder, tmp_path):
    with pytest.raises(TimeoutError), locked(tmp_path / "lock", 0.05):
        pytest.fail("two hold it")


def test_a_killed_process_holds_it_no_longer(holder, tmp_path):
    holder.kill()
    holder.wait()
    with locked(tmp_path / "lock", 0):
        pass


def test_who_waits_gets_it_when_it_is_free(holder, tmp_path):
    threading.Timer(0.2, holder.kill).start()
    with locked(tmp_path / "lock", 60):
        assert holder.wait() != 0


def test_threads_take_turns(tmp_path):
    inside, most = 0, 0

    def take():
        nonlocal inside, most
        with locked(tmp_path / "lock", 60):
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1

    threads = [threading.Thread(target=take) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_process_that_was_forked_meanwhile_does_not_keep_it(tmp_path):
    reading, writing = os.pipe()
    with locked(tmp_path / "lock", 0):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    with locked(tmp_path / "lock", 0):
        pass
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)


def test_an_error_inside_frees_it(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path / "lock", 0):
        raise KeyError
    with locked(tmp_path / "lock", 0):
        pass


def test_a_link_is_no_lock(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / "lock", 0):
        pytest.fail("it was followed")
    assert not (tmp_path / "elsewhere").exists()
