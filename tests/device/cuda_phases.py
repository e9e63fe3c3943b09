"""Where a cold start's milliseconds go: ``python tests/device/cuda_phases.py PACKAGE [REPEATS]``.

Medians over fresh processes, of import, load and first step at (B,S,N) = (1,4096,512). When its clock starts,
a process has imported torch, made its inputs and run the loss's own kernels. Compile the bytecode first.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib import import_module

# A phase inside another is taken out of it.
PHASES = {
    "load: the rest": "runtime.loading:load",
    "read the index": "package.archive:read_front",
    "look at the machine": "runtime.loading:host_facts",
    "hash the frames": "package.archive:Package.check_frames",
    "unpack: locks, folders": "store.unpacked:Store.unpack",
    "unpack: decompress, write": "store.unpacked:Store._fill",
    "unpack: hash the files": "store.unpacked:_wrong",
    "open the libraries": "runtime.abi:Library.__init__",
    "register the operators": "runtime.attention:enroll",
    "first calls: the rest": "runtime.loading:warm_up",
    "programs": "runtime.abi:Library.__call__",
}
spent, inner = defaultdict(float), [0.0]


def timed(phase, call):
    def wrapper(*args, **kwargs):
        inner.append(0.0)
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            took = (time.perf_counter() - start) * 1e3
            spent[phase] += took - inner.pop()
            inner[-1] += took

    return wrapper


def child(package):
    import torch

    def draw(heads, rows):
        return torch.randn(1, heads, rows, 128, device="cuda").bfloat16().requires_grad_()

    q, k, v, grad = draw(32, 8192), draw(8, 12288), draw(8, 12288), draw(32, 8192).detach()
    anchors = torch.arange(0, 4096, 8, device="cuda")[None]
    keep = anchors >= 0
    torch.autograd.grad((q * grad).sum(), q)
    torch.cuda.synchronize()
    clock = time.perf_counter()
    timed("import aotpack", import_module)("aotpack.runtime")
    for phase, path in PHASES.items():
        module, _, names = path.partition(":")
        *outer, name = names.split(".")
        owner = sys.modules[f"aotpack.{module}"]
        for each in outer:
            owner = getattr(owner, each)
        setattr(owner, name, timed(phase, getattr(owner, name)))
    attend = sys.modules["aotpack.runtime.loading"].load(package, "cuda").attention("full")
    loaded = time.perf_counter()
    mask = attend.block_mask(anchors=anchors, keep=keep, context_len=4096)
    torch.autograd.grad((attend(q, k, v, mask) * grad).sum(), (q, k, v))
    torch.cuda.synchronize()
    end = time.perf_counter()
    print(json.dumps({**spent, "first step": (end - loaded) * 1e3, "all": (end - clock) * 1e3}))


def main(package, repeats=5):
    found = defaultdict(lambda: ([], []))
    for _ in range(int(repeats)):
        with tempfile.TemporaryDirectory() as store:
            for state in range(2):
                command = [sys.executable, __file__, "child", package]
                environment = {**os.environ, "AOTPACK_CACHE": store}
                said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
                for phase, took in json.loads(said).items():
                    found[phase][state].append(took)
    print(f"{'ms':28}{'nothing unpacked':>18}{'unpacked':>18}")
    for phase, states in found.items():
        print(f"{phase:28}" + "".join(f"{statistics.median(each or [0]):18.1f}" for each in states))


if __name__ == "__main__":
    (child if sys.argv[1] == "child" else main)(*sys.argv[1 + (sys.argv[1] == "child") :])
