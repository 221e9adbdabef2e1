"""Is this LMDB file whole? Answered by reading it, before LMDB maps it.

LMDB trusts its file: a tree page that was zeroed or a file that was cut short ends the process (a failed assertion, or
SIGBUS on the mapping). A cache may lose its contents but may not take its owner down, so the page tree is walked here
with plain reads first. Layout: LMDB 0.9 on a 64-bit machine (lmdb `mdb.c`: MDB_page, MDB_meta, MDB_db, MDB_node).

The walk reads branch and leaf pages and, when asked, the first page of overflow runs (large values): for a store of
16 GiB in values of 256 KiB that is some 700 pages without and 65,000 more with. LMDB believes the head of a run when it
frees it; a wrong head would free pages of others, so the runs of a page that reads wrong are looked at before it goes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_PAGE_HEAD = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_META = struct.Struct("<IIQQ")  # magic, version, map address, map size; two MDB_db follow, then last page, txn id
_DB = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf, overflow, entries, root
_TAIL = struct.Struct("<QQ")
_NODE = struct.Struct("<HHHH")  # data size low, high, flags, key size
_BRANCH, _LEAF, _OVERFLOW, _META_FLAG = 1, 2, 4, 8
_BIG, _SUB = 1, 2
_NO_PAGE = 0xFFFFFFFFFFFFFFFF
_HEAD = _PAGE_HEAD.size
_DEPTH_MOST = 32


class Unsound(Exception):
    """The file is LMDB's and is not whole; the text says where."""


class NotLmdb(Exception):
    """The file does not begin like an LMDB file."""


Wanted = Callable[[bytes], bool]


def no_runs(_key: bytes) -> bool:
    """Only the trees."""
    return False


def all_runs(_key: bytes) -> bool:
    """Everything."""
    return True


def check(descriptor: int, runs: Wanted = no_runs) -> None:
    """Walk the file behind `descriptor`, and the runs of the keys that `runs` is true for. An empty file is sound.

    Raises NotLmdb, Unsound, or OSError from reading.
    """
    size = os.fstat(descriptor).st_size
    if size:
        _Walk(descriptor, size, runs).all()


class _Walk:
    def __init__(self, descriptor: int, size: int, runs: Wanted) -> None:
        self._descriptor = descriptor
        self._runs = runs
        self._page_bytes, meta = _newest_meta(descriptor, size)
        self._last, self._free, self._main = meta
        self._limit = min(self._last + 1, size // self._page_bytes)
        self._used = bytearray(self._last + 1)

    def all(self) -> None:
        self._tree(self._main, 0, self._main_leaf)
        self._tree(self._free, 0, self._free_leaf)

    def _claim(self, first: int, count: int, limit: int) -> None:
        """Note that a page belongs to something; it must exist and belong to nothing else."""
        if first < 2 or count < 1 or first + count > limit:
            raise Unsound(f"page {first}+{count} lies outside the file of {limit} pages")
        if any(self._used[first : first + count]):
            raise Unsound(f"page {first}+{count} is used twice")
        self._used[first : first + count] = b"\1" * count

    def _read(self, number: int) -> bytes:
        page = os.pread(self._descriptor, self._page_bytes, number * self._page_bytes)
        if len(page) != self._page_bytes:
            raise Unsound(f"page {number} cannot be read whole")
        return page

    def _tree(self, db: tuple[int, int], level: int, leaf: Callable[[bytes, int, int], None]) -> None:
        root, depth = db
        if root == _NO_PAGE:
            return
        if not 1 <= depth <= _DEPTH_MOST:
            raise Unsound(f"tree depth {depth}")
        self._branch(root, depth, leaf)

    def _branch(self, number: int, depth: int, leaf: Callable[[bytes, int, int], None]) -> None:
        self._claim(number, 1, self._limit)
        page = self._read(number)
        said, _, flags, lower, upper = _PAGE_HEAD.unpack_from(page)
        expected = _LEAF if depth == 1 else _BRANCH
        if said != number or flags & 0x0F != expected:
            raise Unsound(f"page {number} says it is page {said} with flags {flags:#x}")
        if not _HEAD <= lower <= upper <= self._page_bytes or lower % 2:
            raise Unsound(f"page {number} has bounds {lower}, {upper}")
        nodes = struct.unpack_from(f"<{(lower - _HEAD) // 2}H", page, _HEAD)
        if not nodes:
            raise Unsound(f"page {number} is empty")
        for offset in nodes:
            if not upper <= offset <= self._page_bytes - _NODE.size:
                raise Unsound(f"page {number} has a node at {offset}")
            low, high, node_flags, key_size = _NODE.unpack_from(page, offset)
            if offset + _NODE.size + key_size > self._page_bytes:
                raise Unsound(f"page {number} has a key of {key_size} bytes")
            if depth > 1:
                self._branch(low | high << 16 | node_flags << 32, depth - 1, leaf)
            else:
                leaf(page, offset, self._value(page, number, offset))

    def _value(self, page: bytes, number: int, offset: int) -> int:
        """Check a leaf node's value and claim its overflow run; returns the run's first page, 0 if it lies inside."""
        low, high, flags, key_size = _NODE.unpack_from(page, offset)
        size, at = low | high << 16, offset + _NODE.size + key_size
        if flags & ~(_BIG | _SUB):
            raise Unsound(f"page {number} has a node with flags {flags:#x}")
        if not flags & _BIG:
            if at + size > self._page_bytes:
                raise Unsound(f"page {number} has a value of {size} bytes")
            return 0
        if at + 8 > self._page_bytes:
            raise Unsound(f"page {number} has a broken reference")
        first: int = struct.unpack_from("<Q", page, at)[0]
        count = (_HEAD - 1 + size) // self._page_bytes + 1
        self._claim(first, count, self._limit)
        if self._runs(page[at - key_size : at]):
            self._check_run(first, count)
        return first

    def _check_run(self, first: int, count: int) -> None:
        head = os.pread(self._descriptor, _HEAD, first * self._page_bytes)
        if len(head) != _HEAD:
            raise Unsound(f"page {first} cannot be read")
        said, _, flags, low, high = _PAGE_HEAD.unpack(head)
        pages = low | high << 16
        if (said, flags & 0x0F) != (first, _OVERFLOW) or pages < count:
            raise Unsound(f"page {first} does not begin a run of {count}")
        if pages > count:  # LMDB writes a shorter value over a longer one of the same transaction
            self._claim(first + count, pages - count, self._last + 1)

    def _main_leaf(self, page: bytes, offset: int, _run: int) -> None:
        """Entries of the main tree are the named databases."""
        low, high, flags, key_size = _NODE.unpack_from(page, offset)
        if not flags & _SUB:
            return
        if low | high << 16 != _DB.size:
            raise Unsound("a named database has a short record")
        fields = _DB.unpack_from(page, offset + _NODE.size + key_size)
        self._tree((fields[7], fields[2]), 1, lambda _page, _offset, _run: None)

    def _free_leaf(self, page: bytes, offset: int, run: int) -> None:
        """Entries of the free tree are lists of pages: a count, then page numbers, descending."""
        low, high, _, key_size = _NODE.unpack_from(page, offset)
        size = low | high << 16
        if run:
            data = os.pread(self._descriptor, size, run * self._page_bytes + _HEAD)
        else:
            start = offset + _NODE.size + key_size
            data = page[start : start + size]
        if len(data) != size or size < 8 or size % 8:
            raise Unsound("a list of free pages is cut short")
        count, *pages = struct.unpack(f"<{size // 8}Q", data)
        if count > len(pages):
            raise Unsound("a list of free pages is cut short")
        for number in pages[:count]:
            # Free pages may lie behind the end of the file: LMDB need not have written them.
            self._claim(number, 1, self._last + 1)


def _newest_meta(descriptor: int, size: int) -> tuple[int, tuple[int, tuple[int, int], tuple[int, int]]]:
    """Page size, and (last page, (free root, depth), (main root, depth)) of the meta page LMDB would use."""
    first = _meta(os.pread(descriptor, 4096, 0))
    if first is None:
        raise NotLmdb
    page_bytes = first[1]
    if page_bytes < 512 or page_bytes & (page_bytes - 1) or page_bytes > 65536:
        raise Unsound(f"page size {page_bytes}")
    second = _meta(os.pread(descriptor, 4096, page_bytes))
    if second is None:
        raise Unsound("the second meta page is damaged")
    newest = first if first[0] >= second[0] else second
    last = newest[2]
    if last > (1 << 40) or last < 1:
        raise Unsound(f"last page {last}")
    if size < 2 * page_bytes:
        raise Unsound("the file ends in its meta pages")
    # The file may end before the last page (free pages need no bytes), but not by more than the map.
    return page_bytes, (last, newest[3], newest[4])


def _meta(page: bytes) -> tuple[int, int, int, tuple[int, int], tuple[int, int]] | None:
    """Transaction id, page size, last page, free tree, main tree."""
    if len(page) < _HEAD + _META.size + 2 * _DB.size + _TAIL.size:
        return None
    magic, version, _, _ = _META.unpack_from(page, _HEAD)
    flags = _PAGE_HEAD.unpack_from(page)[2]
    if magic != _MAGIC or version & 0xFFFF != _DATA_VERSION or not flags & _META_FLAG:
        return None
    at = _HEAD + _META.size
    free, main = _DB.unpack_from(page, at), _DB.unpack_from(page, at + _DB.size)
    last, transaction = _TAIL.unpack_from(page, at + 2 * _DB.size)
    return transaction, free[0], last, (free[7], free[2]), (main[7], main[2])
