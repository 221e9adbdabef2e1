"""The socket file: made without a moment of wide rights, never at the cost of somebody else's file or daemon.

Order: lock the folder, look at what stands at the path, bind under a narrow umask, set group and mode, listen.
A file that is not a socket is never removed. A socket is removed only when nobody answers on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from stratad.control.peer import peer_of
from stratad.errors import StrataError

PATH_LIMIT = 107  # bytes: sun_path holds 108 with its NUL
BACKLOG = 128
_LOCK_TRIES, _LOCK_PAUSE = 20, 0.05  # one second in all


@dataclass(frozen=True, slots=True)
class BoundSocket:
    """A listening socket and the file that is its name. `gid` is the file's group; `inode` tells it from another."""

    sock: socket.socket
    path: str
    gid: int
    inode: tuple[int, int]

    def remove(self) -> None:
        """Close, and remove the file unless another daemon has put its own there meanwhile."""
        with contextlib.suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self.inode:
                os.unlink(self.path)
        self.sock.close()


def _refuse(message: str) -> StrataError:
    return StrataError("control_socket", message, param="control")


async def bind(path: str | os.PathLike[str], group: str | int | None = None) -> BoundSocket:
    """Listen at `path`, mode 0660 and of `group` (a name or id; None keeps the process's own).

    Raises StrataError `control_socket` with a sentence naming the path and what would be right.
    """
    name = _checked_path(path)
    gid = _group_id(group)
    _make_folder(os.path.dirname(name) or ".", gid)
    async with _folder_lock(os.path.dirname(name) or "."):
        _clear_stale(name)
        try:
            return _bind(name, gid)
        except OSError as err:
            raise _refuse(f"control socket {name}: {err.strerror}") from None


def _checked_path(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    size = len(os.fsencode(name))
    if not 0 < size <= PATH_LIMIT:
        raise _refuse(f"control socket path has {size} bytes; it must have 1 to {PATH_LIMIT}: {name!r}")
    if "\0" in name:
        raise _refuse("control socket path holds a NUL byte")
    return name


def _group_id(group: str | int | None) -> int | None:
    if group is None or isinstance(group, int):
        return group
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise _refuse(f"control socket group {group!r} does not exist; create it or name another") from None


def _make_folder(folder: str, gid: int | None) -> None:
    """Make `folder` with mode 0750 if it is missing. The group must reach the socket, so it gets the folder too."""
    try:
        if os.path.isdir(folder):
            return
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        os.mkdir(folder, 0o750)
        os.chmod(folder, 0o750)  # whatever the umask was
        if gid is not None:
            os.chown(folder, -1, gid)
    except OSError as err:
        raise _refuse(f"folder of the control socket {folder}: {err.strerror}") from None


@contextlib.asynccontextmanager
async def _folder_lock(folder: str) -> AsyncIterator[None]:
    """Hold the folder while its socket is looked at and replaced, or two daemons could each remove the other's."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as err:
        raise _refuse(f"folder of the control socket {folder}: {err.strerror}") from None
    try:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_PAUSE)
        else:
            raise _refuse(f"another process holds the folder {folder} of the control socket; try again")
        yield
    finally:
        os.close(fd)  # releases the lock


def _clear_stale(name: str) -> None:
    """Remove a socket that nobody listens on. Raises when anything else stands at the path."""
    try:
        mode = os.lstat(name).st_mode
    except FileNotFoundError:
        return
    except OSError as err:
        raise _refuse(f"control socket {name}: {err.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise _refuse(
            f"control socket {name}: a file that is not a socket stands there; move it or choose another path"
        )
    owner = _who_listens(name)
    if owner is not None:
        raise _refuse(f"control socket {name} is in use by {owner}; stop it or choose another path")
    try:
        os.unlink(name)
    except OSError as err:
        raise _refuse(f"control socket {name} is stale and cannot be removed: {err.strerror}") from None


def _who_listens(name: str) -> str | None:
    """The process behind a socket file in words, or None when connect() is refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(name)
            return f"process {peer_of(probe).pid}"
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except OSError as err:  # a full backlog or missing rights: somebody is there
            return f"another process ({os.strerror(err.errno or errno.EIO)})"


def _bind(name: str, gid: int | None) -> BoundSocket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        before = os.umask(0o177)
        try:
            sock.bind(name)
        finally:
            os.umask(before)
        return _open_up(sock, name, gid)
    except OSError:
        sock.close()
        raise


def _open_up(sock: socket.socket, name: str, gid: int | None) -> BoundSocket:
    """Give the fresh socket its group and mode, then listen; until then nobody can connect."""
    found = os.lstat(name)
    bound = BoundSocket(sock, name, found.st_gid if gid is None else gid, (found.st_dev, found.st_ino))
    try:
        if gid is not None:
            os.chown(name, -1, gid)
        os.chmod(name, 0o660)
        sock.listen(BACKLOG)
    except OSError:
        bound.remove()
        raise
    return bound
