"""Many processes with many threads load one package from an empty store, and some of them are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROCESSES, THREADS, ROUNDS = 16, 4, 20
# Forked from a process that has imported everything: they start at the same moment, and in no time.
STORM = """
import json, os, random, signal, sys, threading, time
import torch
from aotpack.runtime import load
from aotpack.store import Store

package, folder, processes, threads, rounds = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
random.seed(0)

def child(gate):
    os.read(gate, 1)
    failed = []
    def thread():
        try:
            load(package).attention("full")
        except BaseException as error:
            failed.append(repr(error))
    workers = [threading.Thread(target=thread) for _ in range(threads)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    if failed: print(failed, file=sys.stderr, flush=True)
    os._exit(1 if failed else 0)

for turn in range(rounds):
    os.environ["AOTPACK_CACHE"] = root = f"{folder}/{turn}"
    gate, go = os.pipe()
    children = []
    for _ in range(processes):
        pid = os.fork()
        if pid == 0:
            os.close(go)
            child(gate)
        children.append(pid)
    os.close(gate)
    os.close(go)
    time.sleep(random.random() * 0.3)
    victim = random.choice(children)
    os.kill(victim, signal.SIGKILL)
    codes = {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children}
    killed = codes.pop(victim)
    # What the killed one left, the next that unpacks something sweeps.
    left = sorted(os.listdir(f"{root}/staging")) if os.path.exists(f"{root}/staging") else []
    variants = [name for name in os.listdir(f"{root}/variants")]
    wrong = Store().verify(variants[0])
    print(json.dumps({"killed": killed, "codes": sorted(set(codes.values())), "variants": len(variants),
                      "wrong": wrong, "staging": left, "folders": sorted(os.listdir(root))}), flush=True)
"""


def test_one_copy_is_unpacked_whoever_is_killed(dflash_package, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    numbers = map(str, (PROCESSES, THREADS, ROUNDS))
    done = subprocess.run(
        [sys.executable, "-c", STORM, str(dflash_package), str(tmp_path / "stores"), *numbers],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == ROUNDS
    for found in rounds:
        assert found["codes"] == [0], done.stderr
        assert found["variants"] == 1
        assert found["wrong"] == []
        assert found["staging"] == []
        assert found["folders"] == ["locks", "staging", "variants"]
    # The kill hit processes that were still at work.
    assert sum(found["killed"] == -9 for found in rounds) >= ROUNDS // 4
    assert list(temporary.iterdir()) == []
