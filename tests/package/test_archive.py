import hashlib
import json
import os
import re
import resource
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import zstandard

from aotpack.errors import HostError, InputError, IntegrityError, OutputError
from aotpack.package import Package, blob_key, write_package
from aotpack.package.manifest import MAX_BLOB, canonical_json

GOLDEN = "b85d7847edc5d5813d6b992d385ecb043c50ad81c21c731c329cac4443a2f15e"
HEADER = 48


class Memory:
    """A source that is not a file, as a remote would be."""

    name = "memory"

    def __init__(self, data):
        self.data = data
        self.ranges = []

    @property
    def size(self):
        return len(self.data)

    def read_range(self, offset, size):
        self.ranges.append((offset, size))
        return self.data[offset : offset + size]

    def close(self):
        pass


@pytest.fixture
def golden(assets):
    return (assets / "tiny.aotpack").read_bytes()


def read_all(data):
    package = Package(Memory(data))
    return {key: package.read_blob(key) for key in package.manifest.blobs}


def split(data):
    length = struct.unpack_from("<I", data, 12)[0]
    return json.loads(data[HEADER : HEADER + length]), data[HEADER + length :]


def forge(table, frames, version=(1, 0), body=None):
    """A file whose manifest says whatever the test wants, with a right hash."""
    body = canonical_json(table) if body is None else body
    header = b"\x89AOTPK\r\n" + struct.pack("<HHI", *version, len(body))
    return header + hashlib.sha256(body).digest() + body + frames


def test_the_package_of_the_first_release_is_still_read(assets, manifest, blobs):
    with Package.open(assets / "tiny.aotpack") as package:
        assert package.digest == GOLDEN
        assert package.manifest.calling_convention == 1
        assert package.manifest.specs == manifest.specs
        assert package.manifest.variants == manifest.variants
        assert package.manifest.provenance == manifest.provenance
        assert {key: package.read_blob(key) for key in package.manifest.blobs} == blobs
        assert sum(package.blob_sizes.values()) == 1455


def test_what_is_written_is_read_back(tmp_path, manifest, blobs):
    path = tmp_path / "x.aotpack"
    digest = write_package(path, manifest, blobs)
    with Package.open(path) as package:
        assert package.digest == digest
        assert package.name == str(path)
        assert {key: package.read_blob(key) for key in package.manifest.blobs} == blobs


def test_a_written_file_follows_the_umask_and_leaves_no_other_file(tmp_path, manifest, blobs):
    path = tmp_path / "x.aotpack"
    old = os.umask(0o027)
    try:
        write_package(path, manifest, blobs)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_order_of_the_blobs_given_does_not_change_a_byte(tmp_path, manifest, blobs):
    write_package(tmp_path / "a", manifest, blobs)
    write_package(tmp_path / "b", manifest, dict(reversed(blobs.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_another_process_with_another_hash_seed_writes_the_same_bytes(tmp_path, assets):
    program = (
        "import sys; from aotpack.package import *\n"
        "with Package.open(sys.argv[1]) as p:\n"
        "    blobs = {k: p.read_blob(k) for k in p.manifest.blobs}\n"
        "    write_package(sys.argv[2], p.manifest, blobs)\n"
    )
    for seed in ("1", "2"):
        command = [sys.executable, "-c", program, str(assets / "tiny.aotpack"), str(tmp_path / seed)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_libraries_of_a_target_share_a_dictionary_and_readers_fetch_no_more(golden):
    source = Memory(golden)
    package = Package(source)
    index, variant = package.manifest.blobs, package.manifest.variants[0]
    bases = {index[p.library].dictionary for p in variant.programs} - {None}
    assert len(bases) == 1
    assert sum(index[p.library].size for p in variant.programs) < index[bases.pop()].size + 100
    front = sum(size for _, size in source.ranges)
    for key in variant.blobs:
        package.read_blob(key)
    wanted = {index[key].size for key in variant.blobs}
    assert {size for _, size in source.ranges[2:]} == wanted
    assert front == len(golden) - sum(package.blob_sizes.values())


def test_threads_read_at_once(assets, blobs):
    with Package.open(assets / "tiny.aotpack") as package, ThreadPoolExecutor(8) as pool:
        keys = list(blobs) * 50
        assert list(pool.map(package.read_blob, keys)) == [blobs[key] for key in keys]


def test_every_flipped_bit_is_an_error_of_ours(golden):
    for position in range(len(golden)):
        altered = bytearray(golden)
        altered[position] ^= 1 << position % 8
        with pytest.raises((IntegrityError, HostError)):
            read_all(bytes(altered))


def test_every_truncation_is_an_error_of_ours(golden):
    for length in range(len(golden)):
        with pytest.raises(IntegrityError):
            read_all(golden[:length])


def test_altered_frame_names_the_blob_and_both_hashes(golden):
    table, frames = split(golden)
    key = next(key for key, blob in table["blobs"].items() if blob["offset"] == 0)
    size = table["blobs"][key]["size"]
    altered = golden[: len(golden) - len(frames)] + bytes([frames[0] ^ 1]) + frames[1:]
    with pytest.raises(IntegrityError) as caught:
        read_all(altered)
    found = hashlib.sha256(bytes([frames[0] ^ 1]) + frames[1:size]).hexdigest()
    assert str(caught.value) == (
        f"memory was altered: its frame of blob {key} is wrong\n"
        f"  expected: SHA-256 {table['blobs'][key]['frame_sha256']}\n"
        f"  found: SHA-256 {found}\n"
        "  what to do: fetch or build the package again"
    )


def test_truncated_file_says_how_long_it_should_be(golden):
    with pytest.raises(IntegrityError) as caught:
        Package(Memory(golden[:-1]))
    assert str(caught.value) == (
        "memory is truncated\n  expected: 5766 bytes\n  found: 5765 bytes\n"
        "  what to do: fetch or build the package again"
    )


def test_trailing_bytes_are_refused(golden):
    with pytest.raises(IntegrityError) as caught:
        Package(Memory(golden + b"x"))
    assert str(caught.value) == (
        "memory was altered: its end is wrong\n  expected: 5766 bytes\n  found: 5767 bytes\n"
        "  what to do: fetch or build the package again"
    )


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x89AOTPK\n\n" + bytes(100), bytes(100)])
def test_what_is_not_a_package_is_called_that(data):
    with pytest.raises(IntegrityError) as caught:
        Package(Memory(data))
    assert str(caught.value) == "memory is not an aotpack package\n  what to do: name an .aotpack file"


def test_unknown_major_version_needs_another_release(golden):
    table, frames = split(golden)
    with pytest.raises(IntegrityError) as caught:
        Package(Memory(forge(table, frames, version=(2, 3))))
    assert str(caught.value) == (
        "memory has a package format that this aotpack does not read\n"
        "  expected: format 1.x\n  found: format 2.3\n"
        "  what to do: install the aotpack release that wrote it, or fetch or build the package again"
    )


def test_newer_minor_version_warns_of_what_it_ignores(golden, manifest):
    table, frames = split(golden)
    table["format_version"] = "1.7"
    table["variants"][0]["requires"]["memory"] = 3
    table["colour"] = "blue"
    text = (
        "package format 1.7 is newer than 1.0, which this aotpack reads; "
        "ignored: variants[0].requires.memory, colour"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        package = Package(Memory(forge(table, frames, version=(1, 7))))
    assert package.manifest.variants == manifest.variants


def test_version_of_the_header_is_the_manifests(golden):
    table, frames = split(golden)
    with pytest.raises(IntegrityError) as caught:
        Package(Memory(forge(table, frames, version=(1, 1))))
    assert caught.value.problem == "memory was altered: its header is wrong"
    assert caught.value.diagnostics()["expected"] == "format version 1.0"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"a":1e999}',
        b'{"a":NaN}',
        b'{"a": 1}',
        b"9" * 9999,
    ],
)
def test_manifest_that_is_not_canonical_json_of_ours_is_refused(body):
    with pytest.raises(IntegrityError):
        Package(Memory(forge(None, b"", body=body)))


def test_manifest_larger_than_the_limit_is_not_read():
    header = b"\x89AOTPK\r\n" + struct.pack("<HHI", 1, 0, (1 << 26) + 1) + bytes(32)
    with pytest.raises(IntegrityError) as caught:
        Package(Memory(header + bytes(100)))
    assert caught.value.diagnostics()["expected"] == "at most 67108864 bytes"


@pytest.mark.parametrize("shift", [-1, 1, 5000, -5000, 1 << 61])
def test_frames_that_overlap_or_leave_a_gap_are_refused(golden, shift):
    table, frames = split(golden)
    blob = max(table["blobs"].values(), key=lambda blob: blob["offset"])
    blob["offset"] += shift
    with pytest.raises(IntegrityError):
        Package(Memory(forge(table, frames)))


def one_blob(golden, frame, **changes):
    """The golden package with one more blob, whose frame is a given one."""
    table, frames = split(golden)
    entry = {
        "offset": len(frames),
        "size": len(frame),
        "raw_size": 1000,
        "frame_sha256": hashlib.sha256(frame).hexdigest(),
    }
    key = "0" * 64
    table["blobs"][key] = {**entry, **changes}
    return Package(Memory(forge(table, frames + frame))), key


def test_decompression_bomb_is_refused_before_it_is_unpacked(golden):
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 27))
    assert len(bomb) < 20_000
    package, key = one_blob(golden, bomb)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(IntegrityError) as caught:
        package.read_blob(key)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    assert str(caught.value) == (
        f"memory was altered: its frame of blob {key} is wrong\n"
        "  expected: a zstd frame of 1000 bytes\n  found: the frame states another size\n"
        "  what to do: fetch or build the package again"
    )


@pytest.mark.parametrize(
    "frame",
    [
        b"x",
        bytes(100),
        zstandard.ZstdCompressor().compress(bytes(999)),
        zstandard.ZstdCompressor().compress(bytes(1000)),
        zstandard.ZstdCompressor().compress(bytes(1000)) + b"more",
        zstandard.ZstdCompressor().compress(bytes(1000))[:-2],
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)),
    ],
)
def test_frame_with_a_right_hash_and_wrong_content_is_refused(golden, frame):
    package, key = one_blob(golden, frame)
    with pytest.raises(IntegrityError):
        package.read_blob(key)


def test_raw_size_is_bounded(golden):
    with pytest.raises(IntegrityError) as caught:
        one_blob(golden, b"x", raw_size=MAX_BLOB + 1)
    assert str(caught.value) == (
        f"package manifest field 'blobs.{'0' * 64}.raw_size' is wrong\n"
        "  expected: an integer from 0 to 268435456\n  found: 268435457\n"
        "  what to do: fetch or build the package again"
    )


def test_dictionary_of_a_dictionary_is_refused(golden):
    table, _ = split(golden)
    chained = next(key for key, blob in table["blobs"].items() if "dictionary" in blob)
    for dictionary in (chained, "0" * 64, "1" * 64):
        with pytest.raises(IntegrityError) as caught:
            one_blob(golden, b"x", dictionary=dictionary)
        assert caught.value.expected == "the key of a blob that has no dictionary itself"


def test_missing_file_is_an_error_of_the_call(tmp_path):
    with pytest.raises(InputError) as caught:
        Package.open(tmp_path / "no.aotpack")
    assert str(caught.value) == (
        f"there is no package at {tmp_path}/no.aotpack\n  what to do: check the path, or build the package"
    )


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000])
def test_path_that_cannot_be_opened_is_an_error_of_the_call(name):
    with pytest.raises(InputError):
        Package.open(name)


def test_folder_and_named_pipe_are_not_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InputError) as caught:
            Package.open(path)
        assert str(caught.value) == f"{path} is not a file\n  what to do: name an .aotpack file"


def test_file_cut_short_while_it_is_open_is_noticed(tmp_path, manifest, blobs):
    path = tmp_path / "x.aotpack"
    write_package(path, manifest, blobs)
    with Package.open(path) as package:
        os.truncate(path, 5000)
        with pytest.raises(IntegrityError, match="is truncated: blob"):
            [package.read_blob(key) for key in blobs]


def test_file_replaced_while_it_is_open_is_read_as_it_was(tmp_path, manifest, blobs):
    path = tmp_path / "x.aotpack"
    write_package(path, manifest, blobs)
    with Package.open(path) as package:
        (tmp_path / "y").write_bytes(b"another")
        (tmp_path / "y").replace(path)
        assert {key: package.read_blob(key) for key in blobs} == blobs


@pytest.mark.parametrize("place", ["no/such/x.aotpack", "file/x.aotpack", "folder", "x" * 300, "a\0b"])
def test_unwritable_path_is_an_output_error_and_leaves_nothing(tmp_path, manifest, blobs, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputError, match="cannot be written"):
        write_package(tmp_path / place, manifest, blobs)
    assert sorted(tmp_path.rglob("*")) == before


def test_write_that_fails_half_way_keeps_the_old_file(tmp_path, assets):
    path = tmp_path / "x.aotpack"
    path.write_bytes(b"old")
    program = (
        "import resource, sys; from aotpack.package import *\n"
        "with Package.open(sys.argv[1]) as p:\n"
        "    blobs = {k: p.read_blob(k) for k in p.manifest.blobs}\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "    write_package(sys.argv[2], p.manifest, blobs)\n"
    )
    command = [sys.executable, "-c", program, str(assets / "tiny.aotpack"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"OutputError: {path} cannot be written: File too large" in done.stderr
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_blobs_must_be_those_of_the_manifest(tmp_path, manifest, blobs):
    key = next(iter(blobs))
    with pytest.raises(InputError) as caught:
        write_package(tmp_path / "x", manifest, {k: v for k, v in blobs.items() if k != key})
    assert caught.value.diagnostics() == {"expected": f"also {key}"}
    with pytest.raises(InputError) as caught:
        write_package(tmp_path / "x", manifest, {**blobs, blob_key(b"spare"): b"spare"})
    assert caught.value.diagnostics() == {"found": f"also {blob_key(b'spare')}"}
    with pytest.raises(InputError, match="a blob's key is not its SHA-256"):
        write_package(tmp_path / "x", manifest, {**blobs, key: b"other"})
    assert list(tmp_path.iterdir()) == []


def test_package_and_targets_and_store_do_without_torch():
    program = (
        "import sys, aotpack.package, aotpack.targets, aotpack.store\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'fsspec', 'click')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
