"""The store's directory, its lock, its LMDB file: everything that touches the disk goes through here.

    <directory>/lock             our flock; holds the owner's pid, and a mark once the file beside it is known as ours
    <directory>/store.mdb        the data
    <directory>/store.mdb-lock   LMDB's reader table
    <directory>/store.mdb.new    a compaction in progress; removed at open

`trip` is called with the name of each step before it is taken; tests raise from it, or kill the process in it.

LMDB must not be opened twice in a process (its locks are the process's) nor be used across fork(): the flock forbids
the first, also within a process; a child of a fork must not touch the store. Children that exec are safe, as every
descriptor is close-on-exec. One thread writes. Others may read while the caller keeps `close`, `compact` and
`set_map` from running (Medium does not lock by itself).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb

from stratastore import structure
from stratastore.records import Damaged, NewerFormat, format_record, read_format
from stratastore.types import Reason

Trip = Callable[[str], None]

DATA, LOCK, NEW = "store.mdb", "lock", "store.mdb.new"
FORMAT_KEY = b"format"
NEXT_ID_KEY = b"next page id"
MARK = b"strata-store"
DATABASES = (b"chunks", b"conversations", b"manifests", b"meta", b"pages", b"pending")
_SCARCE = 1 << 20  # free bytes below which a short write means a full disk


def no_trip(_step: str) -> None:
    """Nothing goes wrong."""


class Unfit(Exception):
    """The store cannot be used, or not be written. Never leaves the store: it becomes its state."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


class Ruined(Exception):
    """LMDB says that its file is damaged: nothing in it can be trusted. Never leaves the store."""


class Full(Exception):
    """The map, or a transaction, is full; or the disk while the file grew. Making room may help."""


_RUIN = (lmdb.CorruptedError, lmdb.PageNotFoundError)
_FULL = (lmdb.MapFullError, lmdb.TxnFullError)
_REASONS = {
    errno.ENOSPC: Reason.NO_SPACE,
    errno.EDQUOT: Reason.QUOTA,
    errno.EFBIG: Reason.NO_SPACE,
    errno.EIO: Reason.IO_ERROR,
    errno.EROFS: Reason.READ_ONLY,
    errno.EACCES: Reason.NO_PERMISSION,
    errno.EPERM: Reason.NO_PERMISSION,
    errno.ENOENT: Reason.DELETED,
    errno.ESTALE: Reason.DELETED,
    errno.ENOTDIR: Reason.UNUSABLE_PATH,
    errno.EISDIR: Reason.UNUSABLE_PATH,
    errno.EEXIST: Reason.UNUSABLE_PATH,
    errno.ELOOP: Reason.UNUSABLE_PATH,
    errno.ENAMETOOLONG: Reason.UNUSABLE_PATH,
}


@contextlib.contextmanager
def _named(directory: Path) -> Iterator[None]:
    """Turn what LMDB and the system raise into Full, Ruined and Unfit."""
    try:
        yield
    except _FULL as error:
        raise Full(str(error)) from error
    except _RUIN as error:
        raise Ruined(str(error)) from error
    except lmdb.Error as error:
        code = getattr(error, "code", 0)
        raise Unfit(_reason(code, directory, Reason.LMDB), _detail(code, error)) from error
    except OSError as error:
        raise Unfit(_reason(error.errno or 0, directory, Reason.IO_ERROR), _detail(error.errno, error)) from error
    except MemoryError as error:
        raise Unfit(Reason.LMDB, "out of memory") from error


def _reason(code: int, directory: Path, otherwise: Reason) -> Reason:
    """LMDB reports a short write, which is what a disk that fills up gives first, as EIO."""
    if code == errno.EIO:
        with contextlib.suppress(OSError):
            space = os.statvfs(directory)
            if space.f_bavail * space.f_frsize < _SCARCE:
                return Reason.NO_SPACE
    return _REASONS.get(code, otherwise)


def _detail(code: int | None, error: Exception) -> str:
    return os.strerror(code) if code and code in errno.errorcode else str(error)


class Txn:
    """One LMDB transaction. `get` of a write transaction and of small values copies; `view` does not."""

    def __init__(self, raw: lmdb.Transaction[memoryview], handles: dict[bytes, lmdb._Database], trip: Trip) -> None:
        self._raw = raw
        self._handles = handles
        self._trip = trip

    def get(self, database: bytes, key: bytes) -> bytes | None:
        """A copy of the value, None if there is none."""
        value = self.view(database, key)
        return None if value is None else bytes(value)

    def view(self, database: bytes, key: bytes) -> memoryview | None:
        """The value in the map: valid until the transaction ends, or writes."""
        self._trip("get")
        return self._raw.get(key, db=self._handles[database])

    def put(self, database: bytes, key: bytes, value: bytes | memoryview) -> None:
        """Insert or replace. Raises Full, Unfit."""
        self._trip("put")
        self._raw.put(key, value, db=self._handles[database])

    def delete(self, database: bytes, key: bytes) -> bool:
        """Whether it was there."""
        self._trip("delete")
        return self._raw.delete(key, db=self._handles[database])

    def keys(self, database: bytes, start: bytes = b"") -> Iterator[bytes]:
        """Keys from `start` on; the database may be changed between two of them."""
        cursor = self._raw.cursor(db=self._handles[database])
        self._trip("get")
        found = cursor.set_range(start) if start else cursor.first()
        while found:
            key = bytes(cursor.key())
            yield key
            found = cursor.set_range(key + b"\0")

    def items(self, database: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys with copies of their values; the database must not change meanwhile."""
        self._trip("get")
        for key, value in self._raw.cursor(db=self._handles[database]):
            yield bytes(key), bytes(value)

    def count(self, database: bytes) -> int:
        """Number of entries."""
        return self._raw.stat(self._handles[database])["entries"]

    def used_pages(self) -> int:
        """File pages that hold something in the named databases."""
        total = 0
        for handle in self._handles.values():
            stat = self._raw.stat(handle)
            total += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return total


class Medium:
    """One open store directory."""

    def __init__(self, directory: Path, trip: Trip = no_trip) -> None:
        self.directory = directory
        self.path = directory / DATA
        self.discarded = 0  # files that were ours and damaged, and were thrown away
        self.page_bytes = 4096
        self._trip = trip
        self._lock: int | None = None
        self._environment: lmdb.Environment | None = None
        self._handles: dict[bytes, lmdb._Database] = {}
        self._file: tuple[int, int] = (0, 0)
        self._seen_bytes = 0
        self._map_bytes = 0

    @property
    def is_open(self) -> bool:
        """LMDB has its file open."""
        return self._environment is not None

    # ------------------------------------------------------------------------------------------------------ open, close

    def open(self, map_bytes: int) -> None:
        """Take the lock, check the file, open it; make what is missing. Raises Unfit and leaves nothing open."""
        try:
            with _named(self.directory):
                self._open(map_bytes)
        except (Ruined, Full) as error:  # a new file, too: then it is not the file
            self.close()
            raise Unfit(Reason.LMDB, str(error)) from error
        except BaseException:
            self.close()
            raise

    def _open(self, map_bytes: int) -> None:
        self._trip("open")
        self._make_directory()
        self._take_lock()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.directory / NEW)
        self._check_file()
        try:
            self._open_environment(map_bytes)
        except (lmdb.CorruptedError, lmdb.PageNotFoundError, Damaged, Ruined) as error:
            self._close_environment()
            self._discard(str(error))
            self._open_environment(map_bytes)
        self._write_lock(b"%d %s\n" % (os.getpid(), MARK))

    def _make_directory(self) -> None:
        """The directory is made private, not its parents: those are the administrator's."""
        try:
            os.mkdir(self.directory, 0o700)
        except FileExistsError:
            if not self.directory.is_dir():
                raise Unfit(Reason.UNUSABLE_PATH, f"{self.directory} is not a directory") from None
        except FileNotFoundError:
            raise Unfit(Reason.UNUSABLE_PATH, f"{self.directory.parent} does not exist") from None

    def _take_lock(self) -> None:
        self._trip("lock")
        descriptor = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(descriptor, 32, 0).split(b" ")[0].decode("ascii", "replace") or "unknown"
            os.close(descriptor)
            raise Unfit(Reason.OWNED, f"pid {owner}") from None
        self._lock = descriptor

    def _write_lock(self, text: bytes) -> None:
        if self._lock is not None:
            os.pwrite(self._lock, text, 0)
            os.ftruncate(self._lock, len(text))

    def _marked(self) -> bool:
        """The file beside the lock was ours when it was last opened."""
        return self._lock is not None and MARK in os.pread(self._lock, 64, 0)

    def _check_file(self) -> None:
        """Look at the file with plain reads before LMDB maps it. Raises Unfit(FOREIGN_FILE); discards our own ruins."""
        self._trip("check")
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            self._write_lock(b"%d %s\n" % (os.getpid(), MARK))  # we make it, so it is ours however far we get
            return
        try:
            structure.check(descriptor)
        except (structure.NotLmdb, structure.Unsound) as error:
            if not self._marked():
                raise Unfit(Reason.FOREIGN_FILE, str(self.path)) from None
            self._discard(str(error) or "not an LMDB file")
        finally:
            os.close(descriptor)

    def _discard(self, why: str) -> None:
        """Throw our own damaged file away: it is a cache, and conversations should not lie about in copies."""
        if not self._marked():
            raise Unfit(Reason.FOREIGN_FILE, f"{self.path}: {why}")
        for path in (self.path, self.directory / (DATA + "-lock")):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self.discarded += 1

    def _open_environment(self, map_bytes: int) -> None:
        self._trip("lmdb open")
        self._create_private()
        self._environment = lmdb.Environment(
            str(self.path),
            map_size=map_bytes,
            subdir=False,
            mode=0o600,
            max_dbs=len(DATABASES),
            max_readers=8,
            max_spare_txns=0,
            readahead=True,
        )
        self._map_bytes = max(map_bytes, self._environment.info()["map_size"])
        self.page_bytes = self._environment.stat()["psize"]
        self._environment.reader_check()
        self._recognise(self._environment)
        self._handles = {name: self._environment.open_db(name) for name in DATABASES}
        self._remember()

    def _create_private(self) -> None:
        """LMDB alone would create its files under the umask and write through a planted link."""
        for name in (DATA, DATA + "-lock"):
            os.close(os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    def _recognise(self, environment: lmdb.Environment) -> None:
        """Accept an empty file and one of our format; anything else is left alone."""
        if environment.stat()["entries"] == 0:
            meta = environment.open_db(b"meta")
            with environment.begin(write=True) as raw:
                raw.put(FORMAT_KEY, format_record(FORMAT_KEY), db=meta)
            return
        try:
            meta = environment.open_db(b"meta", create=False)
        except (lmdb.NotFoundError, lmdb.IncompatibleError):
            raise Unfit(Reason.FOREIGN_FILE, str(self.path)) from None
        with environment.begin() as raw:
            record = raw.get(FORMAT_KEY, db=meta)
            alone = raw.stat(meta)["entries"] == 0
        if record is None and alone:  # ended between making `meta` and the first commit
            with environment.begin(write=True) as raw:
                raw.put(FORMAT_KEY, format_record(FORMAT_KEY), db=meta)
            return
        if record is None:
            raise Damaged("no format record")
        try:
            read_format(FORMAT_KEY, record)
        except NewerFormat as error:
            raise Unfit(Reason.NEWER_FORMAT, str(error)) from None

    def close(self) -> None:
        """Give everything back. Never raises; the lock file stays, and with it the mark."""
        self._close_environment()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                if self._marked():
                    self._write_lock(b"0 %s\n" % MARK)
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = None

    def _close_environment(self) -> None:
        environment, self._environment = self._environment, None
        self._handles = {}
        if environment is not None:
            with contextlib.suppress(lmdb.Error):
                environment.close()

    # ----------------------------------------------------------------------------------------------------- transactions

    def intact(self) -> None:
        """Raises Unfit if the path leads to another file now, or to a shorter one: touching the map may be fatal."""
        self._trip("stat")
        seen = self._seen_bytes  # before looking: the writer may make the file longer in between
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError as error:
            raise Unfit(_REASONS.get(error.errno or 0, Reason.IO_ERROR), str(self.path)) from None
        if (found.st_dev, found.st_ino) != self._file:
            raise Unfit(Reason.DELETED, f"{self.path} is another file now")
        if found.st_size < seen:
            raise Unfit(Reason.TRUNCATED, f"{found.st_size} bytes of {seen}")

    def _remember(self) -> None:
        found = os.stat(self.path, follow_symlinks=False)
        self._file = (found.st_dev, found.st_ino)
        self._seen_bytes = found.st_size

    @contextlib.contextmanager
    def write(self) -> Iterator[Txn]:
        """A write transaction, durable when the block ends; undone if it raises. Raises Full, Ruined, Unfit."""
        with _named(self.directory):
            environment = self._ready()
            self._trip("begin")
            raw = environment.begin(write=True, buffers=True)
            try:
                yield Txn(raw, self._handles, self._trip)
                self._trip("commit")
                raw.commit()
            except BaseException:
                with contextlib.suppress(lmdb.Error):
                    raw.abort()
                raise
            self._trip("committed")
            self._seen_bytes = os.stat(self.path, follow_symlinks=False).st_size

    @contextlib.contextmanager
    def read(self) -> Iterator[Txn]:
        """A read transaction: a snapshot. Keep it short, it pins pages. Raises Ruined, Unfit."""
        with _named(self.directory):
            environment = self._ready()
            self._trip("begin read")
            raw = environment.begin(buffers=True)
            try:
                yield Txn(raw, self._handles, self._trip)
            finally:
                with contextlib.suppress(lmdb.Error):
                    raw.abort()

    def _ready(self) -> lmdb.Environment:
        if self._environment is None:
            raise Unfit(Reason.CLOSED)
        self.intact()
        return self._environment

    # -------------------------------------------------------------------------------------------------- the file's size

    def file_bytes(self) -> int:
        """Length of the file; 0 if it is not there."""
        try:
            return os.stat(self.path, follow_symlinks=False).st_size
        except OSError:
            return 0

    def free_bytes(self) -> int:
        """What the filesystem would still take. Raises Unfit."""
        with _named(self.directory):
            self._trip("statvfs")
            space = os.statvfs(self.directory)
        return space.f_bavail * space.f_frsize

    def set_map(self, map_bytes: int) -> None:
        """Allow the file to grow to `map_bytes`. No transaction may be open in any thread. Raises Unfit."""
        with _named(self.directory):
            environment = self._ready()
            self._trip("set map")
            environment.set_mapsize(map_bytes)
            self._map_bytes = environment.info()["map_size"]

    def check_readers(self) -> int:
        """Clear reader slots of processes that are gone; returns how many."""
        with _named(self.directory):
            return self._ready().reader_check()

    def check_runs(self, wanted: structure.Wanted) -> None:
        """Look at the file's trees, and at the values of the wanted keys. Between write transactions. Raises Ruined."""
        with _named(self.directory):
            self._ready()
            self._trip("check runs")
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                structure.check(descriptor, wanted)
            except (structure.Unsound, structure.NotLmdb) as error:
                raise Ruined(str(error)) from error
            finally:
                os.close(descriptor)

    def copy_compact(self) -> Path:
        """Write the live pages to a new file beside this one and make it durable. Readers may go on. Raises Unfit."""
        target = self.directory / NEW
        with _named(self.directory):
            environment = self._ready()
            self._trip("copy")
            descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                environment.copyfd(descriptor, compact=True)
                self._trip("copied")
                structure.check(descriptor)
                os.fsync(descriptor)
            except structure.Unsound as error:
                raise Ruined(f"compacted copy: {error}") from error
            finally:
                os.close(descriptor)
        return target

    def swap(self, target: Path, map_bytes: int) -> None:
        """Put a compacted copy in the file's place. No transaction may be open. Raises Unfit, then nothing is open."""
        try:
            with _named(self.directory):
                self.intact()
                self._trip("swap")
                self._close_environment()
                os.rename(target, self.path)
                self._trip("renamed")
                # LMDB's lock file remembers the old file's transaction numbers.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.directory / (DATA + "-lock"))
                self._sync_directory()
                self._open_environment(map_bytes)
        except BaseException:
            self.close()
            raise

    def drop_copy(self) -> None:
        """Remove what a failed compaction left."""
        with contextlib.suppress(OSError):
            os.unlink(self.directory / NEW)

    def _sync_directory(self) -> None:
        self._trip("sync directory")
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
