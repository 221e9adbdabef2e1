"""The store as the daemon sees it: asynchronous, never raising for what happens to disks, never blocking the loop.

    async with await Store.open(path, identity, Options(max_mib=4096)) as store:
        async with store.put(manifest, incoming_bytes=size) as put:
            for index in put.missing:
                await put.write(index, buffer)
            outcome = await put.commit()
        with store.hold(conversations=[key]):
            found = await store.get(key)
            async for ref, data in store.read_pages(found.manifest.pages):
                ...

One thread writes, one reads; jobs wait in line for them, at most `JOBS_MOST` of the callers'. A cancelled caller leaves
its job to end by itself, and a put left without commit is taken back. Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from stratastore import audit
from stratastore.keeper import Keeper, Shared
from stratastore.medium import Trip, no_trip
from stratastore.reader import Buffer, Copy, Reader
from stratastore.types import (
    Conversation,
    Found,
    Manifest,
    Options,
    PageKind,
    PageRef,
    PutOutcome,
    State,
    Stats,
    Verdict,
)

T = TypeVar("T")
JOBS_MOST = 64
Sleep = Callable[[float], Awaitable[None]]


class Store:
    """Made by `open`. `identity` decides what hits: conversations of another one are stale."""

    def __init__(self, directory: Path, shared: Shared, trip: Trip, sleep: Sleep) -> None:
        self.directory = directory
        self._shared = shared
        self._sleep = sleep
        self._keeper = Keeper(directory, shared, trip)
        self._reader = Reader(self._keeper.medium, self._keeper.health, shared, self._report, self._bad_page)
        self._writing = ThreadPoolExecutor(1, "store-writer")
        self._reading = ThreadPoolExecutor(1, "store-reader")
        self._jobs = asyncio.Semaphore(JOBS_MOST)
        self._puts = 0
        self._tending: asyncio.Task[None] | None = None
        self._left: set[asyncio.Future[None]] = set()  # jobs nobody waits for
        self._closing = False
        self._closed = False

    @classmethod
    async def open(
        cls,
        path: str | Path,
        identity: str,
        options: Options,
        *,
        trip: Trip = no_trip,
        sleep: Sleep = asyncio.sleep,
        shared: Shared | None = None,
    ) -> Store:
        """Open the store in `path` (made if its parent exists). Never raises for what is wrong there: see `state`.

        `shared` carries injected clocks; its options and identity are replaced.
        """
        shared = replace(shared, options=options, identity=identity) if shared else Shared(options, identity)
        store = cls(Path(path).absolute(), shared, trip, sleep)
        await store._write(store._keeper.open)
        if options.tick_s is not None:
            store._tending = asyncio.create_task(store._tend(options.tick_s), name="store-tick")
        return store

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish what is running, write down what is in memory, close the file. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        if self._tending is not None:
            self._tending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tending
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._reading, _nothing)
        await loop.run_in_executor(self._writing, self._keeper.close)
        self._reading.shutdown(wait=True)
        self._writing.shutdown(wait=True)
        self._closed = True

    # ------------------------------------------------------------------------------------------------------------- jobs

    async def _write(self, job: Callable[..., T], *arguments: object) -> T:
        return await self._run(self._writing, job, arguments)

    async def _read(self, job: Callable[..., T], *arguments: object) -> T:
        return await self._run(self._reading, job, arguments)

    async def _run(self, thread: ThreadPoolExecutor, job: Callable[..., T], arguments: tuple[object, ...]) -> T:
        if self._closed:
            return job(*arguments)  # a closed store says "no" at once, whoever asks
        async with self._jobs:
            return await asyncio.get_running_loop().run_in_executor(thread, job, *arguments)

    def _leave(self, job: Callable[..., None], *arguments: object) -> asyncio.Future[None]:
        """Give the writer a job nobody needs to wait for."""
        if self._closed:
            job(*arguments)
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            ended.set_result(None)
            return ended
        future = asyncio.get_running_loop().run_in_executor(self._writing, job, *arguments)
        self._left.add(future)
        future.add_done_callback(self._left.discard)
        return future

    def _report(self, error: Exception) -> None:
        """Called in the reader thread."""
        with contextlib.suppress(RuntimeError):  # closing
            self._writing.submit(self._keeper.suspect, error)

    def _bad_page(self, name: bytes, page_id: int) -> None:
        """Called in the reader thread."""
        with contextlib.suppress(RuntimeError):  # closing
            self._writing.submit(self._keeper.hollow, name, page_id)

    async def _tend(self, every_s: float) -> None:
        while True:
            await self._sleep(every_s)
            await self.tick()

    async def tick(self) -> None:
        """Recovery, sweeping, uses written down, compaction when idle; called by itself every `tick_s`."""
        await self._write(self._keeper.tick, self._puts > 0)

    # ---------------------------------------------------------------------------------------------------------- writing

    def put(self, manifest: Manifest, *, incoming_bytes: int = 0, instead_of: Iterable[bytes] = ()) -> Put:
        """Store a conversation, in place of the one of that key and of those in `instead_of`.

        `incoming_bytes`: size of the pages that will be written, so that a conversation that cannot fit is refused
        before anything is evicted for it, and room is made at once.
        """
        return Put(self, manifest, incoming_bytes, tuple(instead_of))

    async def put_conversation(
        self, manifest: Manifest, page: Callable[[PageRef], bytes | bytearray | memoryview]
    ) -> PutOutcome:
        """Store a conversation whose pages can be asked for; only missing ones are."""
        async with self.put(manifest) as put:
            for index in put.missing:
                await put.write(index, page(manifest.pages[index]))
            return await put.commit()

    async def pin(self, key: bytes) -> bool:
        """Keep a conversation from eviction; False if there is none."""
        return await self._write(self._keeper.pin, key, True)

    async def unpin(self, key: bytes) -> bool:
        """Let it be evicted again."""
        return await self._write(self._keeper.pin, key, False)

    async def drop(self, *keys: bytes) -> int:
        """Remove conversations, pinned or not; returns how many there were."""
        return await self._write(self._keeper.drop, keys)

    async def drop_all(self) -> int:
        """Remove everything and give the file's space back."""
        return await self._write(self._keeper.drop_all)

    async def prune(self, *, pinned: bool = False) -> int:
        """Remove conversations of other identities; returns how many."""
        return await self._write(self._keeper.prune, pinned)

    async def compact(self) -> bool:
        """Shrink the file to what is in use now; writing waits meanwhile."""
        return await self._write(self._keeper.compact)

    async def resize(self, max_mib: int) -> None:
        """Another budget, from now on. Raises ValueError."""
        await self._write(self._keeper.resize, self._keeper.limit(max_mib))

    async def set_identity(self, identity: str) -> None:
        """The engine's numeric identity has changed. In force at once: it waits for no disk and for no other job."""
        self._keeper.set_identity(identity)

    # ---------------------------------------------------------------------------------------------------------- reading

    async def get(self, key: bytes) -> Found | None:
        """A conversation of the current identity, and the use of it noted; None is a miss."""
        found = await self._read(self._reader.find, key, False)
        if found is not None:
            self.touch(key)
        return found

    async def show(self, key: bytes) -> Found | None:
        """A conversation of any identity, for looking at: no use, no hit, no miss."""
        return await self._read(self._reader.find, key, True)

    def touch(self, key: bytes) -> None:
        """Note a use of a conversation, also one that served another's prefix."""
        self._shared.touched[key] = self._shared.touched.get(key, 0) + 1

    async def list(self) -> list[Conversation]:
        """All conversations, of every identity, newest use first."""
        return await self._read(self._reader.conversations)

    async def present(self, refs: Sequence[PageRef]) -> tuple[bool, ...]:
        """For each page, whether its bytes are there."""
        return await self._read(self._reader.present, refs)

    async def find_longest(self, chain: Sequence[bytes]) -> int:
        """How many main pages of a chain of page keys, from the first on, are there."""
        return await self._read(self._reader.longest, [PageRef(PageKind.MAIN, key) for key in chain])

    async def read_pages(
        self, refs: Iterable[PageRef], allocate: Callable[[int], Buffer] = bytearray
    ) -> AsyncIterator[tuple[PageRef, Buffer | None]]:
        """Each page with its bytes, in order, verified; None for a page that is not there or is damaged.

        `allocate(size)` gives the buffer a page is copied into; it is called in the reader thread.
        """
        for ref in refs:
            copy: Copy = await self._read(self._reader.begin, ref, allocate)
            while not copy.done:
                await self._read(self._reader.advance, copy)
            yield ref, copy.data

    @contextlib.contextmanager
    def hold(self, *, pages: Iterable[PageRef] = (), conversations: Iterable[bytes] = ()) -> Iterator[None]:
        """Keep pages and conversations from eviction while the block runs: what a waiting request needs."""
        names, keys = [ref.name for ref in pages], list(conversations)
        self._shared.pages.add(names)
        self._shared.conversations.add(keys)
        try:
            yield
        finally:
            self._shared.pages.release(names)
            self._shared.conversations.release(keys)

    # -------------------------------------------------------------------------------------------------------- the store

    @property
    def state(self) -> State:
        """Whether it works. Reading it costs nothing."""
        return self._keeper.health.state()

    @property
    def readable(self) -> bool:
        """Whether what is stored may be read: true also in some degraded states."""
        return self._keeper.health.readable

    @property
    def identity(self) -> str:
        """What hits."""
        return self._shared.identity

    @property
    def max_mib(self) -> int:
        """The budget."""
        return self._shared.options.max_mib

    async def stats(self) -> Stats:
        """Sizes now, counters since the start."""
        return await self._read(self._reader.stats, str(self.directory))

    async def verify(self) -> Verdict:
        """Walk everything and read every byte. A bad page is dropped; records that disagree are counted anew."""
        await self._write(self._keeper.check_structure)
        books = await self._read(self._reader.books)
        if books is None:
            return Verdict(faults=(str(self.state),))
        faults = tuple(await asyncio.to_thread(lambda: tuple(audit.faults(books))))
        bad = size = hollow = 0
        for name, record in books.pages.items():
            if record.hollow:
                hollow += 1
                continue
            copy: Copy = await self._read(self._reader.begin, _ref(name), bytearray)
            gone = copy.page_id != record.id
            while not copy.done:
                await self._read(self._reader.advance, copy)
            if copy.data is not None:
                size += len(copy.data)
            elif not gone:
                bad += 1
        if faults:
            await self._write(self._keeper.repair)
        return Verdict(len(books.manifests), len(books.pages), size, bad, hollow, faults)


class Put:
    """One conversation on its way into the store; use it with `async with`. What it needs is held until it ends."""

    def __init__(self, store: Store, manifest: Manifest, incoming_bytes: int, instead_of: tuple[bytes, ...]) -> None:
        self._store = store
        self._manifest = manifest
        self._incoming_bytes = incoming_bytes
        self._instead_of = instead_of
        self._waiting: list[tuple[PageRef, memoryview]] = []
        self._waiting_bytes = 0
        self._ended = False
        self.missing: tuple[int, ...] = ()
        self.outcome: PutOutcome | None = None

    async def __aenter__(self) -> Self:
        shared = self._store._shared
        shared.pages.add(self._names)
        shared.conversations.add([self._manifest.key])
        self._store._puts += 1
        try:
            plan = await self._store._write(self._store._keeper.begin_put, self._manifest, self._incoming_bytes)
        except BaseException:
            self._end()
            raise
        self.missing, self.outcome = plan.missing, plan.refused
        return self

    @property
    def _names(self) -> list[bytes]:
        return [ref.name for ref in self._manifest.pages]

    async def write(self, index: int, data: bytes | bytearray | memoryview) -> bool:
        """Page `manifest.pages[index]`, parents first; False: the put has failed, stop.

        `data` must stay as it is until the put ends.
        """
        if self.outcome is not None:
            return False
        view = memoryview(data).cast("B")
        self._waiting.append((self._manifest.pages[index], view))
        self._waiting_bytes += len(view)
        if self._waiting_bytes >= self._store._keeper.commit_bytes:
            await self._flush()
        return self.outcome is None

    async def _flush(self) -> None:
        pages, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if pages and self.outcome is None:
            self.outcome = await self._store._write(self._store._keeper.write_pages, self._manifest.key, pages)

    async def commit(self) -> PutOutcome:
        """Write the rest and the manifest; durable when it returns STORED."""
        await self._flush()
        if self.outcome is None:
            self.outcome = await self._store._write(self._store._keeper.finish_put, self._manifest, self._instead_of)
        return self.outcome

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting = []
        if self.outcome is None:
            self.outcome = PutOutcome.CANCELLED
        puts = self._store._shared.counters.puts
        puts[self.outcome.value] = puts.get(self.outcome.value, 0) + 1
        await asyncio.shield(self._end())

    def _end(self) -> asyncio.Future[None]:
        """Let go, after whatever the writer still does for this put; what is left of it goes."""
        self._store._puts -= 1
        return self._store._leave(self._let_go)

    def _let_go(self) -> None:
        shared = self._store._shared
        shared.pages.release(self._names)
        shared.conversations.release([self._manifest.key])
        if self.outcome is not PutOutcome.STORED:
            self._store._keeper.sweep()


def _ref(name: bytes) -> PageRef:
    return PageRef(PageKind(name[0]), name[1:])


def _nothing() -> None:
    """A job that ends when those before it have."""
