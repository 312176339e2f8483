"""Writing files so that a kill or a full disk leaves what was there readable."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a disk, a quota or a file that is full."""


def write_atomic(path: Path, content: bytes) -> None:
    """Replaces a file as a whole: readers see the old content or the new, never a part.

    Raises:
      OSError: names the file; the old content is still there.
    """
    part = path.with_name(f".{path.name}.part")
    with _naming(path):
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def append(path: Path, content: bytes) -> None:
    """Adds whole lines at the end of a file, all of them or none.

    Raises:
      OSError: names the file, which holds what it held before.
      ValueError: the file ends in the middle of a line, as a power cut leaves it.
    """
    with _naming(path):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            before = os.fstat(descriptor).st_size
            if before and os.pread(descriptor, 1, before - 1) != b"\n":
                raise ValueError(f"{path}: ends in an incomplete line; truncate it to the last checkpoint first")
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)


def sync(path: Path) -> None:
    """Returns when the content of a file has reached the disk."""
    with _naming(path), path.open("rb") as file:
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def truncate(path: Path, size: int) -> None:
    """Cuts a file to its first ``size`` bytes; needs no space, so that it works on a full disk."""
    with _naming(path), path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def probe(folder: Path, size: int) -> None:
    """Writes and removes ``size`` bytes in a folder.

    Raises:
      OSError: the folder cannot be written to, or the disk is full; names the folder.
    """
    path = folder / ".probe"
    try:
        with path.open("wb") as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = "no space left on its disk" if error.errno in FULL else f"not writable ({error.strerror})"
        raise OSError(error.errno, f"the run folder cannot be used: {reason}", str(folder)) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a folder for this process; the lock goes with the process, however it ends.

    Raises:
      BlockingIOError: another process holds it.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # on Windows, where every process is let in
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(error.errno, "another process is running in this folder", str(folder)) from error
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            message = "no space left to write this file; what was written before is kept, free some space and resume"
            raise OSError(error.errno, message, str(path)) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sync_folder(folder: Path) -> None:
    # A new name is on the disk only when its folder is. Not every platform can open a folder; there it is left out.
    with contextlib.suppress(PermissionError, NotImplementedError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
