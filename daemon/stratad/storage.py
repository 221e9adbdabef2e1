"""The conversation store as part of the daemon: opened from the settings, told who runs, looked at for the status.

Nothing that is wrong with a disk stops the daemon or holds a request up: the store says `degraded`, requests go on
uncached, and it works again by itself when the disk does.

How much of the disk it may have: `store_max_mib`, but never so much that its file would take more than `DISK_SHARE` of
what the filesystem would have free without it. Reckoned when the store is opened, and again on every reload.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from stratad.settings import Settings, state_directory
from stratad.types import EngineFacts
from stratastore import Options, Stats, Store

_logger = logging.getLogger("stratad.storage")

OFF = "off"
NO_IDENTITY = "unknown"  # until an engine has said its own: nothing hits, and nothing counts as stale
DISK_SHARE = 0.5
LEAST_MIB = 16  # a store that is smaller is of no use; on a disk that is full it says so itself
OPEN_WAIT_S = 5.0  # how long the start waits for a slow disk; afterwards requests are served uncached meanwhile
CLOSE_WAIT_S = 10.0
FRESH_S = 1.0  # how old the figures of the status may be
FILE = "store.mdb"


def store_directory(settings: Settings, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where the store is: the setting, else `store` in the state directory; None: there is none."""
    named = settings.text("store")
    if named == OFF:
        return None
    return Path(named).absolute() if named else (state_directory(settings, environ) / "store").absolute()


def budget_mib(settings: Settings, directory: Path) -> int:
    """The budget in MiB: `store_max_mib`, less where the disk does not have so much to spare."""
    wanted = settings.integer("store_max_mib")
    try:
        present = (directory / FILE).stat().st_size if (directory / FILE).exists() else 0
        space = os.statvfs(directory if directory.exists() else directory.parent)
    except OSError:  # the store finds out and says why
        return wanted
    spare = (space.f_bavail * space.f_frsize + present) * DISK_SHARE / Options(max_mib=wanted).file_limit_ratio
    return min(wanted, max(LEAST_MIB, int(spare) >> 20))


class Storage:
    """Owns the store. `store` is None while there is none: switched off, or not opened yet."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], now: Callable[[], float]) -> None:
        self._settings, self._environ, self._now = settings, environ, now
        self.directory = store_directory(settings, environ)
        self.store: Store | None = None
        self.stats: Stats | None = None  # as of the last look
        self._identity = NO_IDENTITY
        self._looked_at = -FRESH_S
        self._opening: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking = False

    @property
    def identity(self) -> str | None:
        """The numeric identity of the engine, None until one has said it."""
        return None if self._identity == NO_IDENTITY else self._identity

    # -- life

    async def open(self) -> None:
        """Open the store, or leave it opening where the disk is slow. Never raises."""
        if self.directory is None:
            return
        self._opening = asyncio.create_task(self._open(self.directory), name="store-open")
        self._opening.add_done_callback(self._ended)
        await asyncio.wait([self._opening], timeout=OPEN_WAIT_S)
        if self.store is None:
            _logger.warning("store: %s takes its time to open; requests go on uncached", self.directory)

    async def _open(self, directory: Path) -> None:
        options = Options(
            max_mib=await asyncio.to_thread(budget_mib, self._settings, directory),
            half_life_s=self._settings.number("store_half_life_s"),
        )
        store = await Store.open(directory, self._identity, options)
        await store.set_identity(self._identity)  # an engine may have become ready meanwhile
        self.store = store
        await self._look()
        if store.state.reason is None:
            count = self.stats.conversations if self.stats is not None else 0
            _logger.info("store %s: %d conversations, budget %d MiB", directory, count, options.max_mib)
        self._note_budget(options.max_mib)

    def _note_budget(self, given_mib: int) -> None:
        wanted = self._settings.integer("store_max_mib")
        if given_mib < wanted:
            share = f"{DISK_SHARE:.0%} of what the disk has to spare"
            _logger.warning("store: %d MiB instead of the %d of store_max_mib: %s", given_mib, wanted, share)

    async def close(self) -> None:
        """Write down what is in memory and close; the last thing of all. A disk that hangs is left alone."""
        if self._opening is not None:
            await asyncio.wait([self._opening], timeout=CLOSE_WAIT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.store is not None:
            try:
                async with asyncio.timeout(CLOSE_WAIT_S):
                    await self.store.close()
            except TimeoutError:
                _logger.error("store: %s did not close within %g s", self.directory, CLOSE_WAIT_S)

    # -- what happens around it

    def engine_ready(self, facts: EngineFacts) -> None:
        """An engine is ready: from now on what was made under its numeric identity hits."""
        self._identity = facts.info.get("identity") or NO_IDENTITY
        if self.store is not None and self.store.identity != self._identity:
            self._start(self.store.set_identity(self._identity))

    def settings_changed(self) -> None:
        """Take over another budget."""
        if self.store is not None and self.directory is not None:
            self._start(self._resize(self.store, self.directory))

    async def _resize(self, store: Store, directory: Path) -> None:
        max_mib = await asyncio.to_thread(budget_mib, self._settings, directory)
        if store.max_mib != max_mib:
            await store.resize(max_mib)
            _logger.info("store: the budget is %d MiB now", max_mib)
            self._note_budget(max_mib)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _logger.error("internal error around the store", exc_info=task.exception())

    # -- being looked at

    def refresh(self) -> None:
        """See to it that `stats` are soon no older than `FRESH_S`; nobody waits for a disk."""
        if self.store is not None and not self._looking and self._now() - self._looked_at >= FRESH_S:
            self._start(self._look())

    async def _look(self) -> None:
        if self.store is None or self._looking:
            return
        self._looking = True
        try:
            self.stats = await self.store.stats()
        finally:
            self._looking = False
            self._looked_at = self._now()

    @property
    def state_text(self) -> str:
        """`off`, `opening`, `ok`, or `degraded: ...`."""
        if self.directory is None:
            return "off"
        return "opening" if self.store is None else str(self.store.state)

    def describe(self) -> dict[str, object]:
        """The section `store` of the status, JSON-ready. Sizes are null while they cannot be read."""
        stats, store = self.stats, self.store
        if self.directory is None:
            return {"state": self.state_text, "path": None}
        found: dict[str, object] = {"state": self.state_text, "path": str(self.directory)}
        if store is None or stats is None:
            return found
        counters, readable = stats.counters, store.readable
        retry = store.state.retry_in_s
        return {
            **found,
            "retry_in_s": None if retry is None else round(retry, 1),
            "conversations": stats.conversations if readable else None,
            "stale": stats.stale_conversations if readable and self.identity is not None else None,
            "pages": stats.pages if readable else None,
            "bytes": stats.live_bytes if readable else None,
            "file_bytes": stats.file_bytes,
            "budget_bytes": stats.budget_bytes,
            "hits": counters.hits,
            "misses": counters.misses,
            "puts": dict(counters.puts),
            "evictions": counters.evictions,
            "evicted_bytes": counters.evicted_bytes,
            "bytes_read": counters.bytes_read,
            "bytes_written": counters.bytes_written,
            "pages_shared": counters.pages_shared,
            "bad_pages": counters.bad_pages,
            "bad_records": counters.bad_records,
            "discarded_files": counters.discarded_files,
            "compactions": counters.compactions,
            "commit_ms_most": round(counters.commit_ms_most, 1),
        }
