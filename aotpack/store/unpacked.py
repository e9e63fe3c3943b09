"""The node's folder of unpacked variants: one copy for all processes, hashed before every use."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aotpack.errors import HostError, InputError, IntegrityError
from aotpack.package import Package, Program, Variant
from aotpack.package.manifest import canonical_json
from aotpack.store.files import make_folder, open_regular
from aotpack.store.locks import locked

__all__ = ["Entry", "Store", "kernel_folder", "library_path"]

_LOCK_SECONDS: Final = 600.0
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)
_INDEX: Final = "files.json"
_REMEDY: Final = "set AOTPACK_CACHE to a folder of this user on a local, writable, executable file system"


def library_path(folder: Path, program: Program) -> Path:
    """The shared library of a program in an unpacked variant."""
    return folder / _library(program)


def kernel_folder(folder: Path, program: Program) -> Path:
    """The folder with the cubins of a program, under the file names that its library asks for."""
    return folder / _kernels(program)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One unpacked variant.

    Attributes:
        digest: of its file names and blob keys; the name of its folder.
        size: bytes of its files.
        used: when it was last handed out, in seconds since the epoch.
    """

    digest: str
    size: int
    used: float


class Store:
    """A content-addressed folder of unpacked variants, private to its user.

    Args:
        root: the folder; by default ``$AOTPACK_CACHE``, else ``$XDG_CACHE_HOME/aotpack``, else
            ``~/.cache/aotpack``. It is created when it is first needed.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = _default_root() if root is None else Path(root).absolute()

    def unpack(self, package: Package, variant: Variant) -> Path:
        """The folder with a variant's files, each hashed just now; unpacks or repairs what is not right.

        Processes that ask at once share one copy: one of them unpacks, the others wait. Where every file
        is right, no file is written and no lock is taken; the folder's time says when it was last used.

        Raises:
            HostError: the cache folder is not usable; the message says why and what to set.
            IntegrityError: the package was altered, or a file in the cache was and cannot be repaired.
        """
        files, index = _files(variant)
        digest = files[_INDEX]
        folder = self._folder(digest)
        self._check_root()
        if _wrong(folder, files):
            with self._lock(digest):
                self._sweep(digest)
                if wrong := _wrong(folder, files):
                    self._fill(folder, {name: files[name] for name in wrong}, package, index)
                    if wrong := _wrong(folder, files):
                        raise _damaged(folder, wrong, "what was written is not what is read back")
        with contextlib.suppress(OSError):
            os.utime(folder)
        return folder

    def entries(self) -> list[Entry]:
        """What is unpacked, by digest."""
        found: list[Entry] = []
        for folder in sorted((self.root / "variants").glob("[0-9a-f]*")):
            # Another process may remove one meanwhile.
            with contextlib.suppress(FileNotFoundError):
                found.append(Entry(digest=folder.name, size=_size(folder), used=folder.stat().st_mtime))
        return found

    def verify(self, digest: str) -> list[str]:
        """Names of the files of an unpacked variant that are missing or altered; no package is needed.

        Raises:
            InputError: what is given is not a digest.
        """
        folder = self._folder(digest)
        if _wrong(folder, {_INDEX: digest}):
            return [_INDEX]
        return _wrong(folder, json.loads((folder / _INDEX).read_bytes()))

    def remove(self, digest: str) -> None:
        """Delete an unpacked variant; a process that has it loaded keeps running.

        Raises:
            HostError: the cache folder cannot be written.
            InputError: what is given is not a digest.
        """
        folder = self._folder(digest)
        with self._lock(digest):
            self._sweep(digest)
            staged = self.root / "staging" / digest
            with self._writing(), contextlib.suppress(FileNotFoundError):
                make_folder(staged.parent)
                # Renamed first, so that no process sees half of it.
                folder.rename(staged)
                shutil.rmtree(staged)

    def forget(self, before: float) -> int:
        """Delete what is remembered of remotes and self-tests and was not written since ``before``.

        Args:
            before: seconds since the epoch.

        Returns:
            How many bytes that freed.
        """
        freed = 0
        for kind in ("fronts", "frames", "urls", "signatures", "selftests"):
            for path in (self.root / kind).glob("*"):
                # Another process may remove one meanwhile.
                with contextlib.suppress(OSError):
                    facts = path.stat()
                    if facts.st_mtime < before:
                        path.unlink()
                        freed += facts.st_size
        return freed

    def _folder(self, digest: str) -> Path:
        if re.fullmatch(r"[0-9a-f]{64}", digest) is None:
            raise InputError(f"{digest!r} is not the digest of an unpacked variant")
        return self.root / "variants" / digest

    def _check_root(self) -> None:
        with self._writing():
            make_folder(self.root)
            facts = self.root.stat()
            if facts.st_uid not in (0, os.geteuid()):
                raise HostError(f"the cache folder {self.root} belongs to another user", remedy=_REMEDY)
            if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                self.root.chmod(0o700)
            if os.statvfs(self.root).f_flag & os.ST_NOEXEC:
                problem = f"the cache folder {self.root} is on a file system that is mounted noexec"
                raise HostError(problem, remedy=_REMEDY)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _unusable(self.root, error) from error

    @contextlib.contextmanager
    def _lock(self, digest: str, seconds: float | None = None) -> Iterator[None]:
        path = self.root / "locks" / f"{digest}.lock"
        seconds = _LOCK_SECONDS if seconds is None else seconds
        with contextlib.ExitStack() as held:
            try:
                make_folder(path.parent)
                held.enter_context(locked(path, seconds))
            except TimeoutError as error:
                problem = f"another process has held {path} for {seconds:.0f} seconds"
                remedy = "end that process, or set AOTPACK_CACHE to another folder"
                raise HostError(problem, remedy=remedy) from error
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    problem = f"the cache folder {self.root} is on a file system without locks"
                    raise HostError(problem, remedy=_REMEDY) from error
                raise _unusable(self.root, error) from error
            yield

    def _sweep(self, own: str) -> None:
        """Delete what killed processes left; the lock of ``own`` is held, so its staging folder is ours."""
        staging = self.root / "staging"
        for name in sorted(path.name for path in staging.glob("*")):
            if name == own:
                shutil.rmtree(staging / name, ignore_errors=True)
                continue
            with contextlib.suppress(HostError), self._lock(name, seconds=0):
                shutil.rmtree(staging / name, ignore_errors=True)

    def _fill(self, folder: Path, files: Mapping[str, str], package: Package, index: bytes) -> None:
        staged = self.root / "staging" / folder.name
        repair = folder.exists()
        try:
            for name, key in files.items():
                _write(staged / name, index if name == _INDEX else package.read_blob(key))
            if repair:
                # File by file, so that a process that has just hashed the others still finds them.
                for name in files:
                    make_folder((folder / name).parent)
                    (staged / name).replace(folder / name)
            else:
                make_folder(folder.parent)
                staged.rename(folder)
        except OSError as error:
            if repair:
                raise _damaged(folder, list(files), str(error.strerror)) from error
            raise _unusable(self.root, error) from error
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def _default_root() -> Path:
    if named := os.environ.get("AOTPACK_CACHE"):
        return Path(named).expanduser().absolute()
    # The XDG specification has relative paths ignored.
    if Path(xdg := os.environ.get("XDG_CACHE_HOME", "")).is_absolute():
        return Path(xdg) / "aotpack"
    try:
        return Path.home() / ".cache" / "aotpack"
    except RuntimeError as error:
        raise HostError("this user has no home folder to keep a cache in", remedy=_REMEDY) from error


def _files(variant: Variant) -> tuple[dict[str, str], bytes]:
    files = {_library(program): program.library for program in variant.programs}
    for program in variant.programs:
        files |= {f"{_kernels(program)}/{name}": key for name, key in program.kernels}
    index = canonical_json(files)
    return {**files, _INDEX: hashlib.sha256(index).hexdigest()}, index


def _library(program: Program) -> str:
    return f"{program.name}.{program.specialisation}/library.so"


def _kernels(program: Program) -> str:
    return f"{program.name}.{program.specialisation}/kernels"


def _wrong(folder: Path, files: Mapping[str, str]) -> list[str]:
    return [name for name, key in files.items() if _sha256(folder / name) != key]


def _sha256(path: Path) -> str | None:
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _write(path: Path, data: bytes) -> None:
    make_folder(path.parent)
    # Not synced to the disk: what a crash of the machine leaves short is found by its hash and repaired.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400), "wb") as file:
        file.write(data)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _unusable(root: Path, error: OSError) -> HostError:
    return HostError(f"the cache folder {root} cannot be used: {error.strerror or error}", remedy=_REMEDY)


def _damaged(folder: Path, names: list[str], why: str) -> IntegrityError:
    return IntegrityError(
        f"an unpacked variant is damaged and cannot be repaired: {why}",
        expected=f"the package's files in {folder}",
        found=f"other bytes, or nothing, in {', '.join(sorted(names)[:5])}",
        remedy=f"delete that folder, or {_REMEDY}",
    )
