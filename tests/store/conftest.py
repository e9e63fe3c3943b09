"""A tiny package behind a server of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aotpack.store import Store
from aotpack.store.remote import Patience
from tests.servers import FileServer

TINY = Path(__file__).parents[1] / "package" / "assets" / "tiny.aotpack"


@pytest.fixture
def tiny() -> bytes:
    return TINY.read_bytes()


@pytest.fixture
def server(tiny: bytes) -> Iterator[FileServer]:
    with FileServer(files={"/tiny.aotpack": tiny}) as server:
        yield server


@pytest.fixture
def url(server: FileServer) -> str:
    return server.url("/tiny.aotpack")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def patience() -> Patience:
    """Impatient, so that tests are short."""
    return Patience(timeout=1.0, attempts=3, wait=0.01)
