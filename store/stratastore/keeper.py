"""The writer's side: puts, eviction, sweeping, recovery, compaction. Every method runs in the store's writer thread.

A failure ends here. Operations return their result or what stands for "no": the disk is full, the file is gone, a
record is damaged are things that happen to a cache, and the caller goes on without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from stratastore import audit, structure
from stratastore.health import Health
from stratastore.holds import Holds
from stratastore.ledger import Absent, Ledger, chunk_sums
from stratastore.medium import Full, Medium, Ruined, Trip, Txn, Unfit
from stratastore.records import Damaged, PageRecord, Usage, chunk_key
from stratastore.types import MIB, Counters, Manifest, Options, PageRef, PutOutcome, Reason
from stratastore.worth import settle, use, worth

_logger = logging.getLogger("stratastore")

T = TypeVar("T")
FILE_PAGE = 4096
OVERFLOW_HEAD = 16  # bytes LMDB takes of the first page of a value
SLACK_PAGES = 32  # tree pages and records that a commit may add
SWEEP_BYTES = 256 * MIB  # freed in one commit
COMMIT_MOST_BYTES = 64 * MIB
PACE_LEAST_BYTES = 4 * MIB
SLOW_COMMIT_MS = 300.0
SPARE_BYTES = 8 * MIB
FULL_RETRIES = 4
SPACE_RETRIES = 2  # a disk that is full for others, too, is not worth the whole store
PROBE_KEY = b"probe"


@dataclass(slots=True)
class _Filling:
    """A page on its way into the store, over as many commits as it takes."""

    ref: PageRef
    data: memoryview
    sums: array[int]
    page_id: int = 0
    shared: bool = False


@dataclass(slots=True)
class _Piece:
    """Chunks of one page that go into one commit."""

    filling: _Filling
    first: int
    end: int

    @property
    def begins(self) -> bool:
        return self.first == 0

    @property
    def ends(self) -> bool:
        return self.end == len(self.filling.sums)


@dataclass(slots=True)
class PutPlan:
    """Answer to the begin of a put: `refused` or what has to be written, as indexes into the manifest's pages."""

    missing: tuple[int, ...] = ()
    refused: PutOutcome | None = None


@dataclass(slots=True)
class Shared:
    """What writer and reader thread both use.

    `exclusive` is held by a reader for one step, and by the writer while it closes, opens, swaps or resizes the file.
    """

    options: Options
    identity: str
    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    counters: Counters = field(default_factory=Counters)
    pages: Holds = field(default_factory=Holds)
    conversations: Holds = field(default_factory=Holds)
    exclusive: threading.Lock = field(default_factory=threading.Lock)
    touched: dict[bytes, int] = field(default_factory=dict)  # uses not yet written down; changed on the event loop


class Keeper:
    """Owns the medium."""

    def __init__(self, directory: Path, shared: Shared, trip: Trip) -> None:
        self._shared = shared
        self._trip = trip
        self._counters = shared.counters
        self.medium = Medium(directory, trip)
        self.health = Health(shared.options, shared.counters, shared.now)
        self._compact_wanted = False
        self._pace_bytes = COMMIT_MOST_BYTES
        self._last_flush = shared.now()
        self._last_work = shared.now()

    # ---------------------------------------------------------------------------------------------------- open, recover

    def open(self) -> None:
        """Open for the first time; the state says how that went."""
        self._try_open()

    def close(self) -> None:
        """Write down what is in memory, close. Nothing works afterwards."""
        if self.health.reason is None:
            self._guard(None, self._flush)
        self._close_medium()
        self.health.degrade(Reason.CLOSED, "")

    def _close_medium(self) -> None:
        with self._shared.exclusive:
            self.medium.close()

    def _try_open(self) -> bool:
        try:
            with self._shared.exclusive:
                self.medium.close()
                before = self.medium.discarded
                self.medium.open(self._map_bytes())
            if self.medium.discarded > before:
                self._counters.discarded_files += 1
                _logger.warning("store: a damaged file was thrown away; conversations start anew")
            self._start_up()
        except Unfit as error:
            self._close_medium()
            self.health.degrade(error.reason, error.detail)
            return False
        self.health.recover()
        return True

    def _start_up(self) -> None:
        """What a crash may have left is removed; a record that cannot be read does not keep the store from opening."""
        try:
            self._sweep_all()
            self._make_room(0, None)
        except Full:
            self._compact_wanted = True
        except Damaged:
            self._counters.bad_records += 1
            self._count_or_start_over()
        except Ruined as error:
            self._start_over(str(error))

    def _count_or_start_over(self) -> None:
        try:
            self._recount()
        except (Damaged, Full, Ruined) as error:
            self._start_over(str(error))

    def _start_over(self, why: str) -> None:
        """LMDB calls the file damaged: throw it away. Raises Unfit."""
        _logger.warning("store: the file is damaged and thrown away (%s)", why)
        self._counters.discarded_files += 1
        self._begin_anew()

    def _begin_anew(self) -> None:
        with self._shared.exclusive:
            self.medium.close()
            for name in (self.medium.path, self.medium.path.with_name(self.medium.path.name + "-lock")):
                with contextlib.suppress(OSError):
                    os.unlink(name)
            self.medium.open(self._map_bytes())

    def ready(self) -> bool:
        """Whether writing works; tries to recover when it is time to."""
        if self.health.reason is None:
            return True
        if not self.health.due():
            return False
        return self._recover()

    def _recover(self) -> bool:
        if self.health.readable and self.medium.is_open:
            try:
                self._age()
            except (Unfit, Full, Ruined):
                pass  # the whole way, by opening anew, says what is wrong
            else:
                self.health.recover()
                return True
        return self._try_open()

    def _guard(self, otherwise: T, action: Callable[[], T]) -> T:
        """Run a job; whatever is wrong with the disk or the file becomes state, and `otherwise`."""
        if not self.ready():
            return otherwise
        self._last_work = self._shared.now()
        try:
            return action()
        except Unfit as error:
            self._fail(error)
        except Full:
            self._compact_wanted = True
        except Damaged as error:
            self._counters.bad_records += 1
            _logger.warning("store: a damaged record, counting anew (%s)", error)
            self.repair()
        except Ruined as error:
            self._ruined(error)
        return otherwise

    def _fail(self, error: Unfit) -> None:
        reason = Reason.LMDB if error.reason is Reason.CLOSED else error.reason
        self.health.degrade(reason, error.detail)
        if not self.health.readable:
            self._close_medium()

    def _ruined(self, error: Ruined) -> None:
        try:
            self._start_over(str(error))
        except Unfit as unfit:
            self._fail(unfit)

    def suspect(self, error: Exception) -> None:
        """The reader could not read: find out what is wrong."""
        if self.health.reason is not None:
            return
        match error:
            case Unfit() if error.reason is not Reason.CLOSED:
                self._fail(error)
            case Ruined():
                self._ruined(error)
            case Damaged():
                self._counters.bad_records += 1
                self.repair()

    def repair(self) -> None:
        """Count everything anew."""
        try:
            self._count_or_start_over()
        except Unfit as error:
            self._fail(error)

    def _recount(self) -> None:
        with self._write() as txn:
            audit.recount(txn, self._shared.pages.__contains__)
        self._counters.recounts += 1
        self._sweep_all()

    # ----------------------------------------------------------------------------------------------------- transactions

    @contextlib.contextmanager
    def _write(self) -> Iterator[Txn]:
        start = time.perf_counter()
        with self.medium.write() as txn:
            yield txn
            start = time.perf_counter()
        took_ms = (time.perf_counter() - start) * 1e3
        self._counters.commits += 1
        self._counters.commit_ms_most = max(self._counters.commit_ms_most, took_ms)
        self._pace(took_ms)

    def _pace(self, took_ms: float) -> None:
        """Write less at once on a slow disk: jobs that wait for a commit, and a stop of the service, wait for all."""
        if took_ms > SLOW_COMMIT_MS:
            self._pace_bytes = max(PACE_LEAST_BYTES, self._pace_bytes // 2)
        elif took_ms < SLOW_COMMIT_MS / 4:
            self._pace_bytes = min(COMMIT_MOST_BYTES, 2 * self._pace_bytes)

    @contextlib.contextmanager
    def _ledger(self) -> Iterator[Ledger]:
        with self._write() as txn:
            ledger = Ledger(txn, self._shared.pages.__contains__)
            yield ledger
            ledger.close()

    # ------------------------------------------------------------------------------------------------------------- puts

    def begin_put(self, manifest: Manifest, incoming_bytes: int) -> PutPlan:
        """What of a conversation is missing, with room made for `incoming_bytes` of it."""
        return self._guard(PutPlan(refused=PutOutcome.DEGRADED), lambda: self._begin_put(manifest, incoming_bytes))

    def _begin_put(self, manifest: Manifest, incoming_bytes: int) -> PutPlan:
        missing, there = [], 0
        with self.medium.read() as txn:
            ledger = Ledger(txn, self._shared.pages.__contains__)
            for index, ref in enumerate(manifest.pages):
                record = ledger.page(ref.name)
                if record is None or record.hollow:
                    missing.append(index)
                else:
                    there += file_pages(record.size, record.chunk_bytes)
        self._counters.pages_shared += len(manifest.pages) - len(missing)
        need = self._pages_of(incoming_bytes)
        if there + need > self._budget_pages():
            return PutPlan(refused=PutOutcome.TOO_LARGE)
        if not self._make_room(need, manifest.key):
            return PutPlan(refused=PutOutcome.NO_ROOM)
        return PutPlan(tuple(missing))

    def write_pages(self, key: bytes, pages: Sequence[tuple[PageRef, memoryview]]) -> PutOutcome | None:
        """Write pages of a put, parents before children, in commits of bounded size. None: all is well."""
        otherwise: PutOutcome | None = PutOutcome.DEGRADED
        return self._guard(otherwise, lambda: self._write_pages(key, pages))

    def _write_pages(self, key: bytes, pages: Sequence[tuple[PageRef, memoryview]]) -> PutOutcome | None:
        try:
            for pieces in self._commits(pages):
                if not self._write_pieces(key, pieces):
                    return PutOutcome.NO_ROOM
        except Absent:
            return PutOutcome.INCOMPLETE
        return None

    def _commits(self, pages: Sequence[tuple[PageRef, memoryview]]) -> Iterator[list[_Piece]]:
        """Cut pages into commits."""
        chunk = self.chunk_bytes
        pieces: list[_Piece] = []
        room = max(1, self.commit_bytes // chunk)
        for ref, data in pages:
            filling = _Filling(ref, data, chunk_sums(data, chunk))
            first, end = 0, len(filling.sums)
            while first < end:
                take = min(room, end - first)
                pieces.append(_Piece(filling, first, first + take))
                first, room = first + take, room - take
                if room == 0:
                    yield pieces
                    pieces, room = [], max(1, self.commit_bytes // chunk)
        if pieces:
            yield pieces

    def _write_pieces(self, key: bytes, pieces: list[_Piece]) -> bool:
        """One commit; makes room and tries again when it does not fit. False: there is no room to make."""
        size = sum(len(piece.filling.data[self._span(piece)]) for piece in pieces)
        need = self._pages_of(size)
        if not self._make_room(need, key):
            return False
        for attempt in range(FULL_RETRIES):
            try:
                self._commit_pieces(pieces)
                return True
            except Full:
                self._compact_wanted = True
                if not self._evict(need * FILE_PAGE, key):
                    return False
            except Unfit as error:
                scarce = error.reason in (Reason.NO_SPACE, Reason.QUOTA)
                if not scarce or attempt >= SPACE_RETRIES or not self._evict(need * FILE_PAGE, key):
                    raise
            self._age()
        return False

    def _age(self) -> None:
        """Commit next to nothing: what a transaction freed can be used again by the next but one."""
        with self._write() as txn:
            txn.put(b"meta", PROBE_KEY, os.urandom(8))

    def _commit_pieces(self, pieces: list[_Piece]) -> None:
        written = pages = 0
        with self._ledger() as ledger:
            for piece in pieces:
                filling = piece.filling
                if piece.begins:
                    record = ledger.begin_page(filling.ref)
                    filling.shared = record is None
                    filling.page_id = record.id if record else 0
                if filling.shared:
                    continue
                written += self._write_chunks(ledger, piece)
                if piece.ends:
                    size, sums = len(filling.data), filling.sums
                    pages += ledger.end_page(filling.ref.name, filling.page_id, size, self.chunk_bytes, sums)
        self._counters.bytes_written += written
        self._counters.pages_written += pages

    def _write_chunks(self, ledger: Ledger, piece: _Piece) -> int:
        target = PageRecord(piece.filling.page_id, None)
        written = 0
        for sequence in range(piece.first, piece.end):
            self._trip("chunk")
            data = piece.filling.data[sequence * self.chunk_bytes : (sequence + 1) * self.chunk_bytes]
            ledger.write_chunk(target, sequence, data)
            written += len(data)
        return written

    def _span(self, piece: _Piece) -> slice:
        return slice(piece.first * self.chunk_bytes, piece.end * self.chunk_bytes)

    def finish_put(self, manifest: Manifest, instead_of: Iterable[bytes]) -> PutOutcome:
        """Store the manifest, durably; from now on the conversation is there."""
        return self._guard(PutOutcome.DEGRADED, lambda: self._finish_put(manifest, tuple(instead_of)))

    def _finish_put(self, manifest: Manifest, instead_of: tuple[bytes, ...]) -> PutOutcome:
        size = 4 * len(manifest.tokens) + 48 * len(manifest.pages) + len(manifest.extra)
        need = self._pages_of(size)
        for _ in range(FULL_RETRIES):
            if not self._make_room(need, manifest.key):
                return PutOutcome.NO_ROOM
            try:
                self._store_manifest(manifest, instead_of)
                return PutOutcome.STORED
            except Absent:
                return PutOutcome.INCOMPLETE
            except Full:
                self._compact_wanted = True
            if not self._evict(need * FILE_PAGE, manifest.key):
                return PutOutcome.NO_ROOM
            self._age()
        return PutOutcome.NO_ROOM

    def _store_manifest(self, manifest: Manifest, instead_of: tuple[bytes, ...]) -> None:
        now = self._shared.wall()
        with self._ledger() as ledger:
            self._trip("manifest")
            self._note_uses(ledger)
            old = ledger.usage(manifest.key)
            usage = Usage(manifest.identity, len(manifest.tokens), len(manifest.pages), 0, manifest.cost, now, now)
            if old is not None:
                usage.created, usage.hits, usage.pinned = min(old.created, now), old.hits, old.pinned
                usage.weight, usage.last_use = old.weight, old.last_use
                use(usage, now, self._shared.options.half_life_s, hits=0)
            ledger.put_conversation(manifest, usage, instead_of)

    # --------------------------------------------------------------------------------------------------- room, eviction

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk: with LMDB's header it fills whole file pages."""
        return self._shared.options.chunk_kib * 1024 - OVERFLOW_HEAD

    @property
    def commit_bytes(self) -> int:
        """Most that one commit writes now: a part of a small budget, or what it frees could not be reused in time."""
        options = self._shared.options
        return min(options.commit_mib * MIB, max(MIB, options.max_mib * MIB // 16), self._pace_bytes)

    def _budget_pages(self) -> int:
        return self._shared.options.max_mib * MIB // FILE_PAGE

    def _map_bytes(self) -> int:
        """Limit of the file's size; above what a larger budget left, so that evicting from that can be committed."""
        options = self._shared.options
        wanted = int(options.max_mib * MIB * options.file_limit_ratio)
        present = self.medium.file_bytes()
        return max(wanted, present + SPARE_BYTES if present > wanted else 0) // FILE_PAGE * FILE_PAGE

    def _pages_of(self, size: int) -> int:
        """File pages that `size` bytes of pages take, with what records and trees need beside them."""
        pages = file_pages(size, self.chunk_bytes)
        return pages + pages // 64 + SLACK_PAGES if size else 0

    def used_pages(self) -> int:
        """File pages in use. Raises Unfit."""
        with self.medium.read() as txn:
            return txn.used_pages()

    def _make_room(self, need: int, key: bytes | None) -> bool:
        """Evict until `need` more file pages fit the budget; what is pinned, held or `key`'s own goes last or never."""
        lacking = self.used_pages() + need - self._budget_pages()
        if lacking <= 0:
            return True
        self._sweep_all()
        while (lacking := self.used_pages() + need - self._budget_pages()) > 0:
            if not self._evict(lacking * FILE_PAGE, key):
                return False
        return True

    def _evict(self, most_bytes: int, key: bytes | None) -> bool:
        """Drop the conversations worth least until `most_bytes` are free, in one commit; False if none could go."""
        with self._ledger() as ledger:
            victims = self._victims(ledger, key)
            for victim in victims:
                self._trip("evict")
                ledger.drop_conversation(victim)
                self._counters.evictions += 1
                if ledger.freed_bytes >= min(most_bytes, SWEEP_BYTES):
                    break
            self._counters.evicted_bytes += ledger.freed_bytes
        return bool(victims)

    def _victims(self, ledger: Ledger, key: bytes | None) -> list[bytes]:
        """What may go, least worth first. The conversation being replaced goes only if nothing else can."""
        self._note_uses(ledger)
        now, half_life = self._shared.wall(), self._shared.options.half_life_s
        ranked: list[tuple[float, float, bytes]] = []
        own = False
        for name, usage in list(ledger.usages()):
            if settle(usage, now):
                ledger.put_usage(name, usage)
            if usage.pinned:
                continue
            if name == key:
                own = True
            elif name not in self._shared.conversations:
                ranked.append((worth(usage, now, half_life), usage.last_use, name))
        if not ranked and own and key is not None:
            return [key]
        return [name for _, _, name in sorted(ranked)]

    def _sweep_all(self) -> None:
        """Remove what crashes, cancelled puts and released holds left."""
        more = True
        while more:
            with self.medium.read() as txn:
                if not any(name not in self._shared.pages for name in txn.keys(b"pending")):
                    return
            with self._ledger() as ledger:
                self._trip("sweep")
                more = ledger.sweep(SWEEP_BYTES)
                self._counters.swept_pages += ledger.freed_pages

    def sweep(self) -> None:
        """The same as a job."""
        self._guard(None, self._sweep_all)

    # ------------------------------------------------------------------------------------------------------- small jobs

    def hollow(self, name: bytes, page_id: int) -> None:
        """A page did not read as written."""
        self._counters.bad_pages += 1
        _logger.warning("store: page %s does not read as written and is dropped", name.hex())
        self._guard(None, lambda: self._hollow(name, page_id))

    def _hollow(self, name: bytes, page_id: int) -> None:
        prefix = chunk_key(page_id, 0)[:8]
        self.medium.check_runs(lambda key: key.startswith(prefix))
        with self._ledger() as ledger:
            ledger.hollow(name, page_id)

    def check_structure(self) -> None:
        """Look at the whole file below LMDB; a damaged one is thrown away."""
        self._guard(None, lambda: self.medium.check_runs(structure.all_runs))

    def drop(self, keys: Sequence[bytes]) -> int:
        """Remove conversations and what only they held; returns how many there were."""
        return self._guard(0, lambda: self._drop(keys))

    def _drop(self, keys: Sequence[bytes]) -> int:
        dropped = 0
        for key in keys:
            with self._ledger() as ledger:
                self._trip("drop")
                dropped += ledger.drop_conversation(key)
        return dropped

    def drop_all(self) -> int:
        """Remove every conversation, pinned ones too, and give the file's space back."""
        return self._guard(0, self._drop_all)

    def _drop_all(self) -> int:
        with self.medium.read() as txn:
            keys = list(txn.keys(b"conversations"))
        dropped = self._drop(keys)
        self._sweep_all()
        if not self._compact():  # no space for a copy, not even of nothing
            with self.medium.read() as txn:
                empty = txn.count(b"pages") == 0
            if empty:
                self._begin_anew()
        return dropped

    def prune(self, pinned: bool) -> int:
        """Remove conversations of other identities; pinned ones only if asked. Returns how many."""
        return self._guard(0, lambda: self._prune(pinned))

    def _prune(self, pinned: bool) -> int:
        identity = self._shared.identity  # it may change meanwhile
        with self.medium.read() as txn:
            ledger = Ledger(txn, self._shared.pages.__contains__)
            stale = [
                key for key, usage in ledger.usages() if usage.identity != identity and (pinned or not usage.pinned)
            ]
        return self._drop(stale)

    def pin(self, key: bytes, pinned: bool) -> bool:
        """Set or clear the pin; False if there is no such conversation."""
        return self._guard(False, lambda: self._pin(key, pinned))

    def _pin(self, key: bytes, pinned: bool) -> bool:
        with self._ledger() as ledger:
            usage = ledger.usage(key)
            if usage is None:
                return False
            usage.pinned = pinned
            ledger.put_usage(key, usage)
        return True

    def flush(self) -> None:
        """Write down uses."""
        self._guard(None, self._flush)

    def _flush(self) -> None:
        self._last_flush = self._shared.now()
        if self._shared.touched:
            with self._ledger() as ledger:
                self._note_uses(ledger)

    def _note_uses(self, ledger: Ledger) -> None:
        """Uses are kept in memory until something is written anyway; a crash may lose some."""
        now, half_life = self._shared.wall(), self._shared.options.half_life_s
        while self._shared.touched:
            key, uses = self._shared.touched.popitem()
            usage = ledger.usage(key)
            if usage is not None:
                use(usage, now, half_life, hits=uses)
                ledger.put_usage(key, usage)

    def resize(self, options: Options) -> None:
        """Take a new budget: the map grows with it at once; a smaller one evicts now, the file shrinks when idle."""
        self._shared.options = options
        self._guard(None, self._resize)

    def _resize(self) -> None:
        with self._shared.exclusive:
            self.medium.set_map(self._map_bytes())
        self._make_room(0, None)

    # ------------------------------------------------------------------------------------------------------- compaction

    def tick(self, busy: bool) -> None:
        """What is done from time to time: recovery, writing down uses, sweeping; compaction when nothing goes on."""
        idle = self._shared.now() - self._last_work >= self._shared.options.idle_s
        worked = self._last_work
        self._guard(None, lambda: self._tend(idle and not busy))
        self._last_work = worked

    def _tend(self, idle: bool) -> None:
        self.medium.check_readers()
        self._sweep_all()
        if idle or self._shared.now() - self._last_flush >= self._shared.options.flush_s:
            self._flush()
        if idle and self._wasteful():
            self._compact()

    def _wasteful(self) -> bool:
        options, size = self._shared.options, self.medium.file_bytes()
        waste = size - self.used_pages() * FILE_PAGE
        limit = options.compact_waste * size
        return waste >= options.compact_least_mib * MIB and (waste >= limit or self._compact_wanted)

    def compact(self) -> bool:
        """Write a new file without the unused pages and put it in place; False if that could not be done."""
        return self._guard(False, self._compact)

    def _compact(self) -> bool:
        if self.medium.free_bytes() < self.used_pages() * FILE_PAGE + MIB:
            return False
        try:
            copy = self.medium.copy_compact()
            with self._shared.exclusive:
                self.medium.swap(copy, self._map_bytes())
        except Unfit as error:
            self.medium.drop_copy()
            if self.medium.is_open:  # the copy failed; the file is as it was
                self.health.degrade(error.reason, error.detail)
                return False
            raise
        self._compact_wanted = False
        self._counters.compactions += 1
        return True

    def set_identity(self, identity: str) -> None:
        """Another model, another identity: what was stored under the old one does not hit any more. For any thread."""
        self._shared.identity = identity

    def limit(self, max_mib: int) -> Options:
        """The options with another budget. Raises ValueError."""
        return replace(self._shared.options, max_mib=max_mib)


def file_pages(size: int, chunk_bytes: int) -> int:
    """File pages that the chunks of a page of `size` bytes take."""
    whole, rest = divmod(size, max(chunk_bytes, 1))
    per_chunk = -(-(chunk_bytes + OVERFLOW_HEAD) // FILE_PAGE)
    return whole * per_chunk + (-(-(rest + OVERFLOW_HEAD) // FILE_PAGE) if rest else 0)
