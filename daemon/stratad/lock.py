"""One daemon per state directory: a locked file that names its owner's process id."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class LockError(Exception):
    """The state directory cannot be owned; the message says by whom it is, or why not."""


class StateLock:
    """Owns a state directory from `__enter__` to `__exit__`. The kernel lets go of it if the process dies."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None

    def __enter__(self) -> StateLock:
        path = self._directory / "lock"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LockError(f"state directory {self._directory}: {error.strerror}; choose one with --state") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise LockError(f"state directory {self._directory} belongs to a running stratad, pid {owner}") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The file stays: removing it would let two daemons lock two different files of one name.
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None
