"""The reader's side: finding and reading. Every method runs in the store's reader thread.

A step reads at most `STEP_BYTES` in one snapshot and then lets go of it, so that a long restore pins no old pages of
the file and never makes the writer wait long. Bytes are checked while they are copied out; what does not fit its
checksum is not returned, but reported, and is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from stratastore import audit
from stratastore.health import Health
from stratastore.keeper import FILE_PAGE, Shared
from stratastore.medium import Full, Medium, Ruined, Txn, Unfit
from stratastore.records import Damaged, PageRecord, Usage, checksum, chunk_key, read_manifest, read_page, read_usage
from stratastore.types import MIB, Conversation, Found, Manifest, PageRef, Stats
from stratastore.worth import weight

T = TypeVar("T")
STEP_BYTES = 32 * MIB
Report = Callable[[Exception], None]
Bad = Callable[[bytes, int], None]
Buffer = bytearray | memoryview


@dataclass(slots=True)
class Copy:
    """A page that is being copied out. `data` is whole when `done`; None if the page is not there or is damaged."""

    ref: PageRef
    data: Buffer | None = None
    page_id: int = 0
    at: int = 0  # next chunk
    done: bool = False

    def missing(self) -> None:
        """Give up."""
        self.data, self.done = None, True


class Reader:
    """Reads from the keeper's medium. `report` takes what looks like a broken store, `bad` a page that does not fit."""

    def __init__(self, medium: Medium, health: Health, shared: Shared, report: Report, bad: Bad) -> None:
        self._medium = medium
        self._health = health
        self._shared = shared
        self._counters = shared.counters
        self._report = report
        self._bad = bad

    def _step(self, otherwise: T, action: Callable[[Txn], T]) -> T:
        """Run one read transaction; a store that cannot be read gives `otherwise`."""
        if not self._health.readable:
            return otherwise
        try:
            with self._shared.exclusive, self._medium.read() as txn:
                return action(txn)
        except (Damaged, Ruined, Unfit, Full) as error:
            self._report(error)
        return otherwise

    # ---------------------------------------------------------------------------------------------------------- finding

    def present(self, refs: Sequence[PageRef]) -> tuple[bool, ...]:
        """For each page, whether its bytes are there."""
        return self._step((False,) * len(refs), lambda txn: tuple(_has(txn, ref.name) for ref in refs))

    def longest(self, refs: Iterable[PageRef]) -> int:
        """How many pages of a chain, from its first on, are there."""

        def count(txn: Txn) -> int:
            found = 0
            for ref in refs:
                if not _has(txn, ref.name):
                    break
                found += 1
            return found

        return self._step(0, count)

    def find(self, key: bytes, any_identity: bool) -> Found | None:
        """A conversation by its key; None if there is none of this identity."""
        found = self._step(None, lambda txn: self._find(txn, key, any_identity))
        if not any_identity:
            if found is None:
                self._counters.misses += 1
            else:
                self._counters.hits += 1
        return found

    def _find(self, txn: Txn, key: bytes, any_identity: bool) -> Found | None:
        usage, manifest = self._records(txn, key)
        if usage is None or manifest is None:
            return None
        if not any_identity and manifest.identity != self._shared.identity:
            return None
        return Found(manifest, self._conversation(key, usage), tuple(_has(txn, ref.name) for ref in manifest.pages))

    @staticmethod
    def _records(txn: Txn, key: bytes) -> tuple[Usage | None, Manifest | None]:
        usage, manifest = txn.get(b"conversations", key), txn.get(b"manifests", key)
        if usage is None or manifest is None:
            return None, None
        return read_usage(key, usage), read_manifest(key, manifest)

    def conversations(self) -> list[Conversation]:
        """All of them, of every identity, newest use first."""

        def read(txn: Txn) -> list[Conversation]:
            found = [self._conversation(key, read_usage(key, data)) for key, data in txn.items(b"conversations")]
            return sorted(found, key=lambda each: (-each.last_use, each.key))

        return self._step([], read)

    def _conversation(self, key: bytes, usage: Usage) -> Conversation:
        waiting = self._shared.touched.get(key, 0)
        return Conversation(
            key=key,
            identity=usage.identity,
            stale=usage.identity != self._shared.identity,
            pinned=usage.pinned,
            held=key in self._shared.conversations,
            tokens=usage.tokens,
            pages=usage.pages,
            bytes=usage.bytes,
            created=usage.created,
            last_use=usage.last_use,
            hits=usage.hits + waiting,
            weight=weight(usage, self._shared.wall(), self._shared.options.half_life_s),
            cost=usage.cost,
        )

    # ---------------------------------------------------------------------------------------------------------- reading

    def begin(self, ref: PageRef, allocate: Callable[[int], Buffer]) -> Copy:
        """Look a page up, get room for it and copy the first step of it."""
        copy = Copy(ref)
        record = self._step(None, lambda txn: _page(txn, ref.name))
        if record is None or record.hollow:
            copy.missing()
        else:
            copy.page_id, copy.data = record.id, allocate(record.size)
            self.advance(copy)
        return copy

    def advance(self, copy: Copy) -> None:
        """Copy and check up to STEP_BYTES more. A page that is damaged is reported and given up."""
        if copy.done or copy.data is None:
            return
        if not self._step(False, lambda txn: self._advance(txn, copy)):
            copy.missing()

    def _advance(self, txn: Txn, copy: Copy) -> bool:
        record = _page(txn, copy.ref.name)
        if record is None or record.id != copy.page_id or record.hollow or copy.data is None:
            return False  # evicted meanwhile
        target = memoryview(copy.data)
        end = min(len(record.sums), copy.at + max(1, STEP_BYTES // record.chunk_bytes))
        for sequence in range(copy.at, end):
            if not self._copy_chunk(txn, record, sequence, target):
                self._bad(copy.ref.name, record.id)
                return False
        copy.at, copy.done = end, end == len(record.sums)
        if copy.done:
            self._counters.pages_read += 1
            self._counters.bytes_read += record.size
        return True

    @staticmethod
    def _copy_chunk(txn: Txn, record: PageRecord, sequence: int, target: memoryview) -> bool:
        """The check is of the copy: what was checked is what the caller gets, whatever becomes of the map."""
        chunk, length = txn.view(b"chunks", chunk_key(record.id, sequence)), record.chunk_length(sequence)
        if chunk is None or len(chunk) != length:
            return False
        at = sequence * record.chunk_bytes
        target[at : at + length] = chunk
        return checksum(target[at : at + length]) == record.sums[sequence]

    # -------------------------------------------------------------------------------------------------------- the store

    def stats(self, path: str) -> Stats:
        """Sizes and counters; sizes are 0 while the store cannot be read."""
        sizes = self._step((0, 0, 0, 0, 0), self._sizes)
        return Stats(
            state=self._health.state(),
            path=path,
            conversations=sizes[0],
            pages=sizes[1],
            pending=sizes[2],
            live_bytes=sizes[3] * FILE_PAGE,
            file_bytes=self._medium.file_bytes(),
            budget_bytes=self._shared.options.max_mib * MIB,
            stale_conversations=sizes[4],
            counters=replace(self._counters, puts=dict(self._counters.puts)),
        )

    def _sizes(self, txn: Txn) -> tuple[int, int, int, int, int]:
        stale = sum(
            read_usage(key, data).identity != self._shared.identity for key, data in txn.items(b"conversations")
        )
        return (
            txn.count(b"conversations"),
            txn.count(b"pages"),
            txn.count(b"pending"),
            txn.used_pages(),
            stale,
        )

    def books(self) -> audit.Books | None:
        """All records, for a full walk; None if the store cannot be read."""
        otherwise: audit.Books | None = None
        return self._step(otherwise, audit.read_books)


def _page(txn: Txn, name: bytes) -> PageRecord | None:
    data = txn.get(b"pages", name)
    return None if data is None else read_page(name, data)


def _has(txn: Txn, name: bytes) -> bool:
    record = _page(txn, name)
    return record is not None and not record.hollow
