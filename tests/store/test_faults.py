"""Every call to LMDB and to the disk fails, once or from then on: the caller sees misses, and later all is well."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
from stratastore import PutOutcome

from tests.store.support import Clock, Conversations, contents, open_store, whole

MAKE = Conversations(page_size=150_000)
SHARED = MAKE.manifest(b"shared", range(12))
BRANCH = MAKE.manifest(b"branch", [*range(8), *range(90, 97)])
LARGE = MAKE.manifest(b"large", range(1000, 1028))
LARGER = MAKE.manifest(b"larger", range(2000, 2032))
MANIFESTS = {each.key: each for each in (SHARED, BRANCH, LARGE, LARGER)}

FAILURES: dict[str, Callable[[], Exception]] = {
    "no space": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "input/output": lambda: lmdb.Error("mdb_txn_commit", errno.EIO),
    "map full": lambda: lmdb.MapFullError("mdb_put", -30792),
    "panic": lambda: lmdb.PanicError("mdb_txn_begin", -30795),
    "corrupted": lambda: lmdb.CorruptedError("mdb_get", -30796),
}
OUTCOMES = set(PutOutcome)


class Faults:
    """Fails the n-th step, or every step from the n-th on, until mended."""

    def __init__(self, failure: Callable[[], Exception], at: int, persistent: bool) -> None:
        self.failure = failure
        self.at = at
        self.persistent = persistent
        self.steps = itertools.count(1)
        self.seen = 0
        self.failed = False

    def __call__(self, step: str) -> None:
        self.seen = next(self.steps)
        if self.seen == self.at or (self.persistent and self.seen > self.at > 0):
            self.failed = True
            raise self.failure()

    def mend(self) -> None:
        self.at = 0


async def scenario(path: Path, faults: Faults) -> None:
    """A life of a store: two that share, one that pushes out, a drop, a compaction, uses; then the check."""
    clock = Clock()
    async with await open_store(path, 4, clock=clock, trip=faults) as store:
        for manifest in (SHARED, BRANCH, LARGE, LARGER):
            assert await store.put_conversation(manifest, MAKE.data) in OUTCOMES
        await store.pin(b"branch")
        await check_contents(store)
        await store.drop(b"shared")
        await store.compact()
        clock.time += 100
        await store.tick()
        faults.mend()
        clock.time += 100
        await store.tick()
        assert str(store.state) == "ok"
        await check_contents(store)
        await whole(store)
        assert await store.put_conversation(SHARED, MAKE.data) is PutOutcome.STORED
        assert await contents(store, b"shared") == [MAKE.data(ref) for ref in SHARED.pages]
    async with await open_store(path, 4, clock=clock) as store:
        await check_contents(store)
        assert (await whole(store)).hollow_pages == 0


async def check_contents(store: object) -> None:
    """What is there is right, whole or a miss."""
    for key, manifest in MANIFESTS.items():
        found = await contents(store, key)  # type: ignore[arg-type]
        if found is not None:
            assert all(data in (None, MAKE.data(ref)) for ref, data in zip(manifest.pages, found, strict=True))


async def count_steps(path: Path) -> int:
    faults = Faults(FAILURES["panic"], 0, False)
    await scenario(path, faults)
    return faults.seen


async def sweep(path: Path, name: str, persistent: bool, stride: int, offset: int) -> None:
    total = await count_steps(path / "count")
    assert total > 500
    failed = 0
    for at in range(1 + offset, total, stride):
        faults = Faults(FAILURES[name], at, persistent)
        try:
            await scenario(path / str(at), faults)
        except BaseException as error:
            raise AssertionError(f"{name}, persistent={persistent}, step {at} of {total}: {error!r}") from error
        shutil.rmtree(path / str(at))
        failed += faults.failed
    assert failed


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("name", FAILURES)
async def test_some_steps_fail(quick_path: Path, name: str, persistent: bool) -> None:
    offset = 7 * list(FAILURES).index(name) + 3 * persistent
    await sweep(quick_path, name, persistent, stride=307, offset=offset)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("name", FAILURES)
async def test_every_step_fails(quick_path: Path, name: str, persistent: bool) -> None:
    await sweep(quick_path, name, persistent, stride=1, offset=0)
