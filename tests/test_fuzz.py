"""Damaged and forged packages: always an error of ours, and no library is opened that is not whole.

Over reader, verifier and loader; how many inputs there were is printed at the end of each test.
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import aotpack
from aotpack.build.pipeline import CALLING_CONVENTION
from aotpack.cli.commands.inspect import describe
from aotpack.errors import AotpackError, HostError, InputError, IntegrityError
from aotpack.lockfile import Lockfile
from aotpack.package import Package, write_package
from aotpack.package.manifest import canonical_json
from aotpack.runtime import programs
from aotpack.trust import parse_signatures

ASSET = Path(__file__).parent / "package" / "assets" / "tiny.aotpack"


def of_today():
    """The asset under the calling convention that this release's loader opens libraries of."""
    with Package.open(ASSET) as package, tempfile.TemporaryDirectory() as folder:
        blobs = {key: package.read_blob(key) for key in package.manifest.blobs}
        path = Path(folder) / "tiny.aotpack"
        write_package(path, replace(package.manifest, calling_convention=CALLING_CONVENTION), blobs)
        return path.read_bytes()


TINY = of_today()
HEADER = 48
MANIFEST = json.loads(TINY[HEADER : HEADER + struct.unpack_from("<I", TINY, 12)[0]])
FRONT = HEADER + struct.unpack_from("<I", TINY, 12)[0]
SEED = 20261130
relaxed = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """The libraries that a load would open; none is, for they are made of random bytes."""
    paths = []

    def refuse(path, *arguments, **options):
        paths.append(path)
        raise HostError("not opened in this test")

    monkeypatch.setattr(programs, "Library", refuse)
    monkeypatch.setenv("AOTPACK_CACHE", str(tmp_path / "store"))
    return paths


@pytest.fixture
def counted(capsys):
    """Counts inputs by what came of them, and prints the counts."""
    counts = Counter()
    yield counts
    with capsys.disabled():
        print(f"\n{sum(counts.values())} inputs: {dict(counts.most_common())}")


def outcome(path, opened):
    """Reads, verifies and loads a file; the exit codes of the errors, 0 for none."""
    codes = []
    for use in (_read, _verify, _load):
        del opened[:]
        try:
            use(path)
            codes.append(0)
        except AotpackError as error:
            codes.append(error.exit_code)
    return tuple(codes)


def _read(path):
    with Package.open(path) as package:
        describe(package)


def _verify(path):
    with Package.open(path) as package:
        package.check_blobs()


def _load(path):
    aotpack.load(path)


def own_frames():
    """The ranges of the file that a load on this machine reads, and the others."""
    blobs = MANIFEST["blobs"]
    variant = next(v for v in MANIFEST["variants"] if v["target"].startswith("cpu"))
    keys = {program["library"] for program in variant["programs"]}
    keys |= {blobs[key]["dictionary"] for key in keys if "dictionary" in blobs[key]}
    return [range(FRONT + blobs[k]["offset"], FRONT + blobs[k]["offset"] + blobs[k]["size"]) for k in keys]


def test_an_undamaged_package_comes_as_far_as_its_libraries(tmp_path, opened):
    path = tmp_path / "x.aotpack"
    path.write_bytes(TINY)
    codes = outcome(path, opened)
    assert codes[:2] == (0, 0)
    assert codes[2] in (3, 5)


def test_every_flipped_byte(tmp_path, opened, counted):
    path, own = tmp_path / "x.aotpack", own_frames()
    for place in range(len(TINY)):
        data = bytearray(TINY)
        data[place] ^= 0xFF
        path.write_bytes(data)
        codes = outcome(path, opened)
        counted[codes] += 1
        if place < FRONT:
            assert codes == (4, 4, 4), place
        else:
            assert codes[:2] == (0, 4), place
            if any(place in part for part in own):
                assert codes[2] == 4, place
        assert codes[2] != 4 or not opened, place


def test_every_truncation_and_some_bytes_too_many(tmp_path, opened, counted):
    path = tmp_path / "x.aotpack"
    for length in range(len(TINY)):
        path.write_bytes(TINY[:length])
        codes = outcome(path, opened)
        counted[codes] += 1
        assert codes == (4, 4, 4), length
        assert not opened
    path.write_bytes(TINY + b"\0")
    assert outcome(path, opened) == (4, 4, 4)


edits = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "delete", "copy"]),
        st.integers(0, len(TINY) - 1),
        st.binary(min_size=1, max_size=40),
        st.integers(0, len(TINY) - 1),
    ),
    min_size=1,
    max_size=6,
)


def edited(data, changes):
    data = bytearray(data)
    for kind, place, piece, other in changes:
        if kind == "set":
            data[place : place + len(piece)] = piece
        elif kind == "insert":
            data[place:place] = piece
        elif kind == "delete":
            del data[place : place + len(piece)]
        else:
            data[place : place + len(piece)] = data[other : other + len(piece)]
    return bytes(data)


def test_edits_at_random(tmp_path, opened, counted):
    path = tmp_path / "x.aotpack"

    @seed(SEED)
    @settings(relaxed, max_examples=1500)
    @given(edits)
    def run(changes):
        data = edited(TINY, changes)
        path.write_bytes(data)
        codes = outcome(path, opened)
        counted[codes] += 1
        if data == TINY:
            assert codes[:2] == (0, 0)
            return
        # An edit of the front is found by all; one behind it by the verifier.
        assert codes[1] == 4
        assert codes[0] in (0, 4)
        assert codes[2] != 4 or not opened

    run()


def places(value, at=()):
    yield at
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield from places(child, (*at, key))


PLACES = [place for place in places(MANIFEST) if place]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["../../etc/passwd", "/", "..", "a" * 64, "0" * 64, "cuda-sm90", "general", "9.0a"]),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=6,
)


def forged(place, action, value):
    """A package whose manifest was changed at one place and hashed again, as someone without a key can."""
    table = copy.deepcopy(MANIFEST)
    parent = table
    for key in place[:-1]:
        parent = parent[key]
    if action == "delete":
        del parent[place[-1]]
    elif action == "add" and isinstance(parent, dict):
        parent[str(value)[:30]] = value
    else:
        parent[place[-1]] = value
    body = canonical_json(table)
    return TINY[:12] + struct.pack("<I", len(body)) + hashlib.sha256(body).digest() + body + TINY[FRONT:]


def test_forged_manifests_with_right_hashes(tmp_path, opened, counted):
    path = tmp_path / "x.aotpack"
    original = {program["library"] for v in MANIFEST["variants"] for program in v["programs"]}

    @seed(SEED)
    @settings(relaxed, max_examples=2500)
    @given(st.sampled_from(PLACES), st.sampled_from(["set", "set", "delete", "add"]), values)
    def run(place, action, value):
        path.write_bytes(forged(place, action, value))
        codes = outcome(path, opened)
        counted[codes] += 1
        assert set(codes) <= {0, 2, 3, 4, 5}
        # Whatever the manifest says, only bytes that hash to their key are ever opened.
        for library in opened:
            assert hashlib.sha256(library.read_bytes()).hexdigest() in original
            assert (tmp_path / "store") in library.parents

    run()


def test_locks_and_signature_files(tmp_path, counted):
    lock = tmp_path / "aotpack.lock"
    whole = json.dumps({
        "schema": "aotpack.lock/1",
        "packages": {"d": {"digest": "1" * 64, "targets": ["cuda-sm90"], "sources": ["s3://b/d"]}},
    }).encode()  # fmt: skip
    signatures = (Path(__file__).parent / "trust" / "assets").glob("*.sig")
    signature = next(signatures).read_bytes()

    @seed(SEED)
    @settings(relaxed, max_examples=1500)
    @given(edits)
    def run(changes):
        small = [(kind, place % 200, piece, other % 200) for kind, place, piece, other in changes]
        lock.write_bytes(edited(whole, small))
        for use in (lambda: Lockfile.read(lock), lambda: parse_signatures(edited(signature, small), "x.sig")):
            try:
                use()
                counted["accepted"] += 1
            except (IntegrityError, InputError) as error:
                counted[error.exit_code] += 1

    run()
