"""Long lives: the file stays bounded, commits stay short, a reader sees only whole pages."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import pytest
from stratastore import Manifest, PageKind, PageRef, PutOutcome, Store

from tests.store.support import IDENTITY, Clock, open_store, whole

MIB = 1 << 20


def image(number: int, size: int) -> tuple[Manifest, dict[bytes, bytes]]:
    """A conversation of pages of 1 MiB, about, and a checkpoint; cheap to make."""
    rng = random.Random(number)
    block = os.urandom(MIB)
    pages: list[PageRef] = []
    data: dict[bytes, bytes] = {}
    parent: bytes | None = None
    while size > 0:
        key = rng.randbytes(32)
        kind = PageKind.MAIN if size > MIB else PageKind.CHECKPOINT
        pages.append(PageRef(kind, key, parent, len(pages)))
        data[pages[-1].name] = key + block[: min(size, rng.randrange(MIB // 2, MIB))]
        size -= len(data[pages[-1].name])
        parent = key if kind is PageKind.MAIN else parent
    return Manifest(b"%d" % number, IDENTITY, range(number, number + 500), pages, cost=1.0), data


async def cycles(
    store: Store, count: int, least: int, most: int, budget_mib: int, slow_commits: float | None = None
) -> None:
    rng = random.Random(7)
    slowest, biggest, living = 0.0, 0.0, []
    for number in range(count):
        manifest, data = image(number, rng.randrange(least, most))
        start = time.perf_counter()
        assert await store.put_conversation(manifest, lambda ref, data=data: data[ref.name]) is PutOutcome.STORED  # type: ignore[misc]
        slowest = max(slowest, time.perf_counter() - start)
        living.append(manifest.key)
        if rng.random() < 0.3:
            await store.drop(living.pop(rng.randrange(len(living))))
        biggest = max(biggest, (await store.stats()).file_bytes / budget_mib / MIB)
    stats = await store.stats()
    assert biggest <= 1.25
    if slow_commits is not None:
        assert stats.counters.commit_ms_most < slow_commits
    assert stats.live_bytes > 0.6 * stats.budget_bytes
    assert stats.counters.puts == {"stored": count}
    print(
        f"{count} puts, file {biggest:.3f} of the budget, live {stats.live_bytes / stats.budget_bytes:.3f}, "
        f"slowest commit {stats.counters.commit_ms_most:.0f} ms, slowest put {slowest * 1e3:.0f} ms, "
        f"{stats.counters.evictions} evictions"
    )
    await whole(store)


async def test_the_file_stays_bounded(quick_path: Path) -> None:
    async with await open_store(quick_path / "s", 24) as store:
        await cycles(store, 60, MIB, 6 * MIB, 24)


@pytest.mark.slow
async def test_five_hundred_cycles_on_disk(tmp_path: Path) -> None:
    async with await open_store(tmp_path / "s", 384) as store:
        await cycles(store, 500, 6 * MIB, 48 * MIB, 384, slow_commits=1000.0)


async def test_reading_goes_on_beside_writing_and_compaction(quick_path: Path) -> None:
    clock = Clock()
    async with await open_store(quick_path / "s", 64, clock=clock) as store:
        kept, content = image(1, 6 * MIB)
        await store.put_conversation(kept, lambda ref: content[ref.name])
        await store.pin(kept.key)
        stop = False

        async def read() -> int:
            rounds = 0
            while not stop:
                async for ref, data in store.read_pages(kept.pages):
                    assert data == content[ref.name]
                rounds += 1
            return rounds

        reader = asyncio.create_task(read())
        for number in range(2, 20):
            manifest, data = image(number, 8 * MIB)
            assert await store.put_conversation(manifest, lambda ref, data=data: data[ref.name]) == "stored"  # type: ignore[misc]
            if number % 6 == 0:
                assert await store.compact()
            if number % 9 == 0:
                await store.resize(64 + number)
        stop = True
        assert await reader > 3
        await whole(store)


async def test_the_loop_is_never_held_up(quick_path: Path) -> None:
    """Jobs take a writer thread's time, not the loop's: a put of 96 MiB leaves it free to turn."""
    async with await open_store(quick_path / "s", 256) as store:
        manifest, data = image(1, 96 * MIB)
        put = asyncio.create_task(store.put_conversation(manifest, lambda ref: data[ref.name]))
        turns = 0
        while not put.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert await put is PutOutcome.STORED
        assert turns >= 3
