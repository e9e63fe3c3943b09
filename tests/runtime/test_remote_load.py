"""``aotpack.load`` from a URL: what is read, and what still works without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import aotpack
from aotpack.errors import IntegrityError, MismatchError, NoVariantError, OfflineError
from aotpack.package import Package
from tests.servers import FileServer

OFFLINE = """
import socket, sys
def refuse(*a, **k):
    raise RuntimeError("the network was used")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
import fsspec
fsspec.spec.AbstractFileSystem.__init__ = fsspec.url_to_fs = fsspec.filesystem = refuse
import torch, aotpack
attend = aotpack.load(sys.argv[1], offline=True).attention("full")
spec = attend.spec
q = torch.randn(1, spec.heads, 16, spec.head_dim, dtype=getattr(torch, spec.dtype))
k = torch.randn(1, spec.kv_heads, 48, spec.head_dim, dtype=q.dtype)
mask = attend.block_mask(
    anchors=torch.tensor([[5]]), keep=torch.ones(1, 1, dtype=torch.bool), context_len=32
)
print(attend(q, k, k, mask).isfinite().all().item())
"""


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTPACK_CACHE", str(tmp_path / "store"))


@pytest.fixture
def server(dflash_package: Path, float32_package: Path) -> Iterator[FileServer]:
    files = {"/dflash": dflash_package.read_bytes(), "/float32": float32_package.read_bytes()}
    with FileServer(files=files) as server:
        yield server


def needed(package: Path) -> int:
    """Bytes of the front and of all that is loaded to run a package of one variant."""
    with Package.open(package) as opened:
        blobs = opened.manifest.blobs
        keys = {key for variant in opened.manifest.variants for key in variant.code}
        keys |= {blobs[key].dictionary for key in keys if blobs[key].dictionary}
        front = opened.size - sum(blob.size for blob in blobs.values())
        return front + sum(blobs[key].size for key in keys)


def step(pack: aotpack.Pack) -> torch.Tensor:
    attend = pack.attention("full")
    spec = attend.spec
    dtype = getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, spec.heads, 32, spec.head_dim, dtype=dtype, generator=generator)
    k = torch.randn(1, spec.kv_heads, 82, spec.head_dim, dtype=dtype, generator=generator)
    keep = torch.ones(1, 2, dtype=torch.bool)
    mask = attend.block_mask(anchors=torch.tensor([[7, 40]]), keep=keep, context_len=50)
    out: torch.Tensor = attend(q, k, k, mask)
    return out


def test_a_url_loads_what_the_file_does(server: FileServer, dflash_package: Path) -> None:
    pack = aotpack.load(server.url("/dflash"))
    assert server.sent == needed(dflash_package) < dflash_package.stat().st_size
    assert (pack.path, pack.target) == (server.url("/dflash"), aotpack.load(dflash_package).target)
    assert torch.equal(step(pack), step(aotpack.load(dflash_package)))


def test_a_warm_load_reads_48_bytes_and_an_offline_one_nothing(server: FileServer) -> None:
    aotpack.load(server.url("/dflash"))
    before = server.sent
    aotpack.load(server.url("/dflash"))
    assert server.sent == before + 48
    asked = len(server.requests)
    assert step(aotpack.load(server.url("/dflash"), offline=True)).isfinite().all()
    assert len(server.requests) == asked


def test_offline_a_fresh_process_opens_no_socket(server: FileServer) -> None:
    aotpack.load(server.url("/dflash"))
    command = [sys.executable, "-c", OFFLINE, server.url("/dflash")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.stdout.strip() == "True", done.stderr


def test_offline_without_an_earlier_load_says_what_to_do(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTPACK_OFFLINE", "true")
    with pytest.raises(OfflineError) as caught:
        aotpack.load(server.url("/dflash"))
    assert caught.value.remedy == f"run 'aotpack pull {server.url('/dflash')}' while online"
    assert server.requests == []


def test_what_does_not_fit_is_refused_before_a_frame_is_read(
    server: FileServer, dflash_pack: aotpack.Pack, dflash_package: Path
) -> None:
    with Package.open(dflash_package) as package:
        front = package.size - sum(blob.size for blob in package.manifest.blobs.values())
    spec = replace(dflash_pack.specs["full"], heads=28)
    with pytest.raises(MismatchError):
        aotpack.load(server.url("/dflash"), specs=spec)
    assert server.sent == front
    with pytest.raises(NoVariantError):
        aotpack.load(server.url("/dflash"), "cuda")
    assert server.sent == front + 48


def test_replicas_are_loaded_as_one(server: FileServer, dflash_package: Path, tmp_path: Path) -> None:
    copies = [str(tmp_path / "gone.aotpack"), server.url("/dflash"), dflash_package]
    with pytest.warns(UserWarning, match="from another replica: there is no package at"):
        assert step(aotpack.load(copies)).isfinite().all()


def test_replicas_that_differ_are_refused(server: FileServer, dflash_package: Path) -> None:
    with pytest.raises(IntegrityError, match="the replicas are not copies of one package"):
        aotpack.load([dflash_package, server.url("/float32")])


def test_a_url_can_fall_back_to_eager(server: FileServer) -> None:
    with pytest.warns(UserWarning, match="aotpack runs dense eager attention"):
        assert aotpack.load(server.url("/dflash"), "cuda", on_miss="eager").target is None
