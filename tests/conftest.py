"""Packages that tests share: each is built once a session, by the real builder."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from filelock import FileLock

import aotpack
from aotpack.build import build
from aotpack.drafter import specs_from_config
from aotpack.spec import AttentionSpec, MaskSpec

EXAMPLES = Path(__file__).parent.parent / "examples"
DFLASH = MaskSpec(family="dflash", block_size=16)
# Every rule, and every part of one, once: each costs half a minute to compile.
MASKS = {
    "full": DFLASH,
    "sliding": MaskSpec(family="dflash", block_size=16, window=100),
    "speculators-2048": MaskSpec(family="dflash-speculators", block_size=16, window=2048, causal=True),
    "causal": MaskSpec(family="causal"),
    "everything": MaskSpec(family="full"),
    "eagle3": MaskSpec(family="eagle3"),
    "eagle3-sliding": MaskSpec(family="eagle3-speculators", window=70),
    "peagle": MaskSpec(family="peagle"),
    "prefix": MaskSpec(family="prefix"),
    "chunked": MaskSpec(family="chunked", window=50),
    "padded": MaskSpec(family="and", parts=(MaskSpec(family="causal"), MaskSpec(family="padding"))),
    "packed-window": MaskSpec(
        family="and", parts=(MaskSpec(family="document"), MaskSpec(family="sliding", window=50))
    ),
    "dflash-or-causal": MaskSpec(family="or", parts=(DFLASH, MaskSpec(family="causal"))),
}
# Whose rules are parts of those above; they are evaluated, and traced for CUDA, but not compiled.
MORE_MASKS = {
    "speculators": MaskSpec(family="dflash-speculators", block_size=16),
    "speculators-sliding": MaskSpec(family="dflash-speculators", block_size=16, window=100),
    "window": MaskSpec(family="sliding", window=100),
    "eagle3-speculators": MaskSpec(family="eagle3-speculators"),
    "document": MaskSpec(family="document"),
}
SMALL = {"heads": 6, "kv_heads": 2, "head_dim": 32, "value_dim": 48, "scale": 0.2}


# Of the property tests; a run that failed is repeated with AOTPACK_TEST_SEED.
SEED = int(os.environ.get("AOTPACK_TEST_SEED") or int.from_bytes(os.urandom(4), "big"))
os.environ["AOTPACK_TEST_SEED"] = str(SEED)  # for the workers, which must agree


def pytest_report_header() -> str:
    return f"property tests: AOTPACK_TEST_SEED={SEED}"


def pytest_configure() -> None:
    """Tests interrupt processes, which a shell's background jobs would be deaf to."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's own cache, and neither does a process that a test starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AOTPACK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the session's packages; AOTPACK_TEST_PACKAGES keeps one from session to session."""
    kept = os.environ.get("AOTPACK_TEST_PACKAGES")
    if kept:
        return Path(kept)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return tmp_path_factory.mktemp("packages")
    # One for all workers, beside the folders that are each worker's own.
    shared = tmp_path_factory.getbasetemp().parent / "packages"
    shared.mkdir(exist_ok=True)
    return shared


def build_once(folder: Path, name: str, specs: Mapping[str, AttentionSpec]) -> Path:
    """The package of that name for this machine's CPU, built by whoever asks first."""
    path = folder / f"{name}.aotpack"
    with FileLock(folder / f".{name}.lock"):
        if not path.exists():
            build(specs, ["cpu"], path)
    return path


@pytest.fixture(scope="session")
def dflash_package(built: Path) -> Path:
    """The bfloat16 drafter of examples/qwen2.5-0.5b-dflash, one spec "full"."""
    return build_once(built, "dflash", specs_from_config(EXAMPLES / "qwen2.5-0.5b-dflash" / "config.json"))


@pytest.fixture(scope="session")
def float32_package(built: Path) -> Path:
    """The same drafter in float32."""
    return build_once(built, "float32", specs_from_config(EXAMPLES / "qwen2.5-0.5b-dflash" / "float32.toml"))


@pytest.fixture(scope="session")
def masks_package(built: Path) -> Path:
    """A small float32 attention with every mask family, values wider than keys and a scale of its own."""
    specs = {name: AttentionSpec(dtype="float32", mask=mask, **SMALL) for name, mask in MASKS.items()}
    return build_once(built, "masks", specs)


@pytest.fixture(scope="session")
def masks_pack(masks_package: Path) -> aotpack.Pack:
    return aotpack.load(masks_package)


@pytest.fixture(scope="session")
def dflash_pack(dflash_package: Path) -> aotpack.Pack:
    return aotpack.load(dflash_package)


@pytest.fixture(scope="session")
def float32_pack(float32_package: Path) -> aotpack.Pack:
    return aotpack.load(float32_package)
