"""Ship a package: build, sign and push it here, then load it offline on a node.

    python examples/ship_it.py
    python examples/ship_it.py --bucket s3://bucket/drafters
    python examples/ship_it.py --pull s3://bucket/drafters/drafter.aotpack --key ship-it/release.key.pub

Of the first command the bucket is a folder, ``ship-it/bucket``; --bucket takes any URL of fsspec to which
this process may write. The third command is the node's part alone, for any machine that has the public key.

The node is a process with a store of its own. It pulls the package; then a fresh process, offline, loads what
that key has signed, runs forward and backward and compares with dense fp64 math. What the key has not signed
is refused before anything of it is opened, with exit code 4. Every command is printed as one would type it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import aotpack
from aotpack import Attention
from aotpack.demo.example import exit_codes
from aotpack.dense import dense_attention
from aotpack.masks import Lengths, dense
from aotpack.trust import PublicKey

SCHEMA = "aotpack.example.ship/1"
CONFIG = Path(__file__).parent / "qwen2.5-0.5b-dflash" / "config.json"
WORK = Path("ship-it")
PROGRAMS = {"aotpack": [sys.executable, "-m", "aotpack"], "python": [sys.executable]}


def run(where: str, *command: object, **environment: object) -> dict[str, Any]:
    """The JSON object that a command prints; the variables are added to this process's own.

    Raises:
        subprocess.CalledProcessError: it failed, and said why on stderr.
    """
    program, *arguments = map(str, command)
    added = {name: str(value) for name, value in environment.items()}
    typed = [*(f"{name}={value}" for name, value in added.items()), program, *arguments]
    print(f"{where}$ {' '.join(typed)}", file=sys.stderr)
    done = subprocess.run(
        [*PROGRAMS[program], *arguments, "--json"], env={**os.environ, **added}, stdout=subprocess.PIPE,
        text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def release(bucket: str, given: Path | None) -> dict[str, Any]:
    """The team's side: a key, a package, a signature, a push; where the package is now.

    Args:
        bucket: a URL, or a path of this machine.
        given: a package to ship instead of one that is built here.
    """
    package, key = WORK / "drafter.aotpack", WORK / "release.key"
    WORK.mkdir(exist_ok=True)
    if not key.exists():
        run("here", "aotpack", "keygen", "-o", key)
    if given is not None:
        shutil.copyfile(given, package)
        package.with_name(f"{package.name}.sig").unlink(missing_ok=True)
    elif not package.exists():
        run("here", "aotpack", "build", CONFIG, "--target", "cpu", "-o", package)
    run("here", "aotpack", "sign", package, "--key", key)
    place = bucket.rstrip("/") if "://" in bucket else f"file://{Path(bucket).resolve()}"
    pushed = run("here", "aotpack", "push", package, f"{place}/{package.name}")
    return {"url": pushed["url"], "package_bytes": package.stat().st_size}


def node(url: str, key: Path) -> dict[str, Any]:
    """The node's side: a pull into its own store, then a process that has no network.

    Args:
        url: of the package.
        key: the public key of whoever may have signed it.
    """
    with tempfile.TemporaryDirectory(prefix="aotpack-node-") as store:
        own = {"AOTPACK_CACHE": store, "AOTPACK_TRUSTED_KEYS": key}
        pulled = run("node", "aotpack", "pull", url, **own)
        loaded = run("node", "python", __file__, "--load", url, AOTPACK_OFFLINE=1, **own)
    return {"bytes_read": pulled["bytes_read"], **loaded}


def load(url: str) -> dict[str, Any]:
    """What a trainer on the node does; ``AOTPACK_TRUSTED_KEYS`` names the key that must have signed."""
    pack = aotpack.load(url)
    return {
        "digest": pack.digest,
        "signer": PublicKey.parse(os.environ["AOTPACK_TRUSTED_KEYS"]).key_id,
        "target": pack.target,
        "load_ms": round(1e3 * pack.stats().load_s, 1),
        "errors": errors_from_dense_math(pack.attention("full")),
    }


def errors_from_dense_math(attend: Attention) -> dict[str, float]:
    """||x - exact|| / ||exact|| of one DFlash step's output and gradients; "exact" is dense fp64 math."""
    spec, context_len, anchors = attend.spec, 300, torch.tensor([[17, 120, 260]])
    query_len = anchors.numel() * (spec.mask.block_size or 1)
    key_len = context_len + query_len
    keep = torch.ones_like(anchors, dtype=torch.bool)
    mask = attend.block_mask(anchors=anchors, keep=keep, context_len=context_len)
    visible = dense(
        spec.mask, {"anchors": anchors, "keep": keep}, Lengths(batch=1, query=query_len, key=key_len)
    )
    shapes = (
        (1, spec.heads, query_len, spec.head_dim),
        (1, spec.kv_heads, key_len, spec.head_dim),
        (1, spec.kv_heads, key_len, spec.value_dim),
    )
    q, k, v = (torch.randn(shape, dtype=getattr(torch, spec.dtype)).requires_grad_() for shape in shapes)
    exact_q, exact_k, exact_v = (leaf.detach().double().requires_grad_() for leaf in (q, k, v))
    out = attend(q, k, v, mask)
    exact, _ = dense_attention(exact_q, exact_k, exact_v, visible, spec.scale)
    grad_out = torch.randn_like(out)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]
    right = [exact.detach(), *torch.autograd.grad(exact, (exact_q, exact_k, exact_v), grad_out.double())]
    pairs = zip(("out", "dq", "dk", "dv"), found, right, strict=True)
    return {name: float((x.double() - y).norm() / y.norm()) for name, x, y in pairs}


def report(result: dict[str, Any]) -> str:
    """What the node did, in a few lines."""
    errors = ", ".join(f"{name} {error:.1e}" for name, error in result["errors"].items())
    of = f" of {result['package_bytes']}" if "package_bytes" in result else ""
    return "\n".join(
        [
            f"package      {result['url']}",
            f"digest       {result['digest']}",
            f"signed by    {result['signer']}",
            f"node read    {result['bytes_read']}{of} bytes",
            f"node loaded  {result['target']}, offline, in {result['load_ms']:.0f} ms",
            f"from fp64    {errors}",
        ]
    )


def main() -> None:
    """Parse the command line, ship, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bucket", default=str(WORK / "bucket"), help="where to push: a URL or a folder")
    parser.add_argument(
        "--package", type=Path, help="a package with a DFlash spec 'full'; built when not given"
    )
    parser.add_argument("--pull", metavar="URL", help="the node's part alone")
    parser.add_argument("--key", type=Path, default=WORK / "release.key.pub", help="the node's trusted key")
    parser.add_argument("--load", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with exit_codes():
        if options.load:
            result = load(options.load)
        else:
            shipped = {"url": options.pull} if options.pull else release(options.bucket, options.package)
            result = {"schema": SCHEMA, **shipped, **node(shipped["url"], options.key)}
    print(json.dumps(result, indent=2) if options.json else report(result))


if __name__ == "__main__":
    main()
