"""What a node remembers: by exact key, atomically, and without it nothing breaks."""

import stat

from aotpack.store.notes import Notes

KEY = {"digest": "a" * 64, "device": "cpu"}


def test_a_note_is_found_under_its_key_and_no_other(tmp_path):
    notes = Notes(tmp_path, "selftests")
    notes.put(KEY, {"passed": True})
    assert notes.get(KEY) == {"passed": True}
    assert notes.get({**KEY, "device": "cuda:0"}) is None
    notes.put(KEY, {"passed": False})
    assert notes.get(KEY) == {"passed": False}


def test_notes_are_private_and_leave_no_debris(tmp_path):
    Notes(tmp_path, "selftests").put(KEY, {})
    (path,) = (tmp_path / "selftests").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_damaged_or_swapped_note_is_forgotten(tmp_path):
    notes = Notes(tmp_path, "selftests")
    notes.put(KEY, {"passed": True})
    notes.put({"other": 1}, {"passed": False})
    mine, other = sorted(
        (tmp_path / "selftests").iterdir(), key=lambda path: b"device" not in path.read_bytes()
    )
    mine.write_bytes(other.read_bytes())
    assert notes.get(KEY) is None
    for damage in (b"", b"[]", b"{", b"[" * 100000, b'{"key":1}'):
        mine.write_bytes(damage)
        assert notes.get(KEY) is None


def test_a_folder_that_cannot_be_written_only_forgets(tmp_path):
    (tmp_path / "store").write_bytes(b"a file, not a folder")
    notes = Notes(tmp_path / "store", "selftests")
    notes.put(KEY, {"passed": True})
    assert notes.get(KEY) is None
