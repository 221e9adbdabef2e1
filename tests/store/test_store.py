"""What a store is for: equal pages once, back as written, budgets kept, what is needed kept."""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from stratastore import Manifest, Options, PageKind, PageRef, PutOutcome, Store
from stratastore.types import Reason

from tests.store.support import IDENTITY, OTHER_IDENTITY, Clock, Conversations, contents, open_store, whole

MAKE = Conversations()


async def put(store: Store, manifest: Manifest, make: Conversations = MAKE) -> PutOutcome:
    return await store.put_conversation(manifest, make.data)


def expected(manifest: Manifest, make: Conversations = MAKE) -> list[bytes]:
    return [make.data(ref) for ref in manifest.pages]


async def test_a_conversation_comes_back_as_it_was_also_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    manifest = MAKE.manifest(b"a", range(1, 24), cost=12.5)
    async with await open_store(tmp_path / "s", clock=clock) as store:
        assert str(store.state) == "ok"
        assert await put(store, manifest) is PutOutcome.STORED
        assert await contents(store, b"a") == expected(manifest)
    async with await open_store(tmp_path / "s", clock=clock) as store:
        found = await store.get(b"a")
        assert found is not None
        assert found.manifest == manifest
        assert all(found.present)
        assert (found.conversation.hits, found.conversation.cost) == (1, 12.5)  # uses before this one
        assert await contents(store, b"a") == expected(manifest)
        assert await store.get(b"b") is None
        await whole(store)


async def test_equal_prefixes_are_stored_once_and_a_turn_writes_what_is_new(tmp_path: Path) -> None:
    first, branch = MAKE.manifest(b"a", range(40)), MAKE.manifest(b"b", [*range(32), 99, 98, 97, 96])
    longer = MAKE.manifest(b"a", range(48))
    async with await open_store(tmp_path / "s") as store:
        for manifest, new in ((first, None), (branch, {36}), (longer, {44, 48})):
            async with store.put(manifest) as put_:
                missing = {manifest.pages[index].position for index in put_.missing}
                assert missing == (new if new is not None else {ref.position for ref in manifest.pages})
                for index in put_.missing:
                    assert await put_.write(index, MAKE.data(manifest.pages[index]))
                assert await put_.commit() is PutOutcome.STORED
        stats = await store.stats()
        assert stats.pages == len({ref.name for manifest in (branch, longer) for ref in manifest.pages})
        assert await store.drop(b"a") == 1
        assert await contents(store, b"b") == expected(branch)
        assert (await store.stats()).pages == len(branch.pages)
        assert await store.drop(b"b", b"never") == 1
        stats = await store.stats()
        assert (stats.pages, stats.conversations, stats.pending) == (0, 0, 0)
        await whole(store)


async def test_chains_are_found_page_by_page(tmp_path: Path) -> None:
    manifest = MAKE.manifest(b"a", range(20))
    other = MAKE.manifest(b"b", [*range(12), 77, 77, 77, 77])
    chain = [ref.key for ref in other.pages if ref.kind is PageKind.MAIN]
    async with await open_store(tmp_path / "s") as store:
        assert await store.find_longest(chain) == 0
        await put(store, manifest)
        assert await store.find_longest(chain) == 3
        present = await store.present(other.pages)
        assert [ref.position for ref, there in zip(other.pages, present, strict=True) if not there] == [16, 16, 16]


async def test_pages_larger_than_a_commit_and_empty_ones(tmp_path: Path) -> None:
    make = Conversations()
    sizes = {PageKind.MAIN: 9_000_000, PageKind.CHECKPOINT: 0, PageKind.DRAFTER: 1, PageKind.TAIL: 256 * 1024 - 16}
    make.size = lambda ref: sizes[ref.kind]  # type: ignore[method-assign]
    manifest = make.manifest(b"a", range(9))
    async with await open_store(tmp_path / "s", commit_mib=1) as store:
        assert await put(store, manifest, make) is PutOutcome.STORED
        assert store._shared.counters.commits > 18
        assert await contents(store, b"a") == expected(manifest, make)
        await whole(store)


async def test_a_slow_disk_gets_smaller_commits(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "s", 4096)
    keeper = store._keeper
    assert keeper.commit_bytes == 64 << 20
    for _ in range(9):
        keeper._pace(1000.0)
    assert keeper.commit_bytes == 4 << 20
    for _ in range(9):
        keeper._pace(1.0)
    assert keeper.commit_bytes == 64 << 20
    await store.close()


async def test_another_identity_never_hits_is_listed_and_can_be_pruned(tmp_path: Path) -> None:
    stale_make = Conversations(identity=OTHER_IDENTITY)
    stale, pinned = stale_make.manifest(b"old", range(20)), stale_make.manifest(b"kept", range(12))
    fresh = MAKE.manifest(b"new", range(20))
    async with await open_store(tmp_path / "s") as store:
        for manifest, make in ((stale, stale_make), (pinned, stale_make), (fresh, MAKE)):
            assert await put(store, manifest, make) is PutOutcome.STORED
        assert await store.pin(b"kept")
        assert await store.get(b"old") is None
        shown = await store.show(b"old")
        assert shown is not None
        assert shown.conversation.stale
        assert {each.key: each.stale for each in await store.list()} == {b"old": True, b"kept": True, b"new": False}
        assert (await store.stats()).stale_conversations == 2
        assert await store.prune() == 1
        assert await store.prune(pinned=True) == 1
        assert (await store.stats()).pages == len(fresh.pages)
        await store.set_identity(OTHER_IDENTITY)
        assert await store.get(b"new") is None
        await whole(store)


async def test_the_least_worth_goes_first(tmp_path: Path) -> None:
    clock = Clock()
    make = Conversations(page_size=200_000)
    async with await open_store(tmp_path / "s", 8, clock=clock, half_life_s=100) as store:
        for name, base, cost in ((b"costly", 0, 9.0), (b"used", 100, 1.0), (b"plain", 200, 1.0)):
            assert await put(store, make.manifest(name, range(base, base + 20), cost), make) is PutOutcome.STORED
            clock.time += 1
        await store.get(b"used")
        for number in range(6):
            clock.time += 1
            key, base = b"new%d" % number, 1000 * (number + 1)
            assert await put(store, make.manifest(key, range(base, base + 20), 1.0), make) is PutOutcome.STORED
            keys = {each.key for each in await store.list()}
            assert {b"costly", b"used", key} <= keys
        assert b"plain" not in keys
        await whole(store)


async def test_pinned_and_held_are_not_evicted_and_what_is_replaced_goes_last(tmp_path: Path) -> None:
    make = Conversations(page_size=200_000)
    pinned, held, new = (
        make.manifest(key, range(base, base + 16)) for key, base in ((b"p", 0), (b"h", 50), (b"n", 90))
    )
    async with await open_store(tmp_path / "s", 4) as store:
        await put(store, pinned, make)
        await store.pin(b"p")
        await put(store, held, make)
        with store.hold(conversations=[b"h"]):
            async with store.put(new, incoming_bytes=make.total(new)) as put_:
                assert put_.outcome is PutOutcome.NO_ROOM
                assert not await put_.write(0, b"")
        assert await put(store, new, make) is PutOutcome.STORED
        assert {each.key for each in await store.list()} == {b"p", b"n"}
        # `n` again, with other contents: only its old self can make room.
        changed = make.manifest(b"n", range(500, 516))
        assert await put(store, changed, make) is PutOutcome.STORED
        assert await contents(store, b"n") == expected(changed, make)
        await store.unpin(b"p")
        assert await put(store, held, make) is PutOutcome.STORED
        await whole(store)


async def test_pages_that_are_held_survive_the_conversation_that_had_them(tmp_path: Path) -> None:
    manifest = MAKE.manifest(b"a", range(20))
    async with await open_store(tmp_path / "s") as store:
        await put(store, manifest)
        with store.hold(pages=manifest.pages[:3]):
            await store.drop(b"a")
            assert await store.present(manifest.pages) == tuple(index < 3 for index in range(len(manifest.pages)))
            await whole(store)
        await store.tick()
        assert (await store.stats()).pages == 0
        await whole(store)


async def test_a_put_keeps_the_shared_prefix_that_eviction_would_take(tmp_path: Path) -> None:
    make = Conversations(page_size=300_000)
    donor, heir = make.manifest(b"donor", range(16)), make.manifest(b"heir", [*range(8), *range(90, 106)])
    async with await open_store(tmp_path / "s", 4) as store:
        await put(store, donor, make)
        async with store.put(heir, incoming_bytes=make.total(heir) * 2 // 3) as put_:
            assert {heir.pages[index].position for index in put_.missing} == {12, 16, 20, 24}
            for index in put_.missing:
                await put_.write(index, make.data(heir.pages[index]))
            assert await put_.commit() is PutOutcome.STORED
        assert [each.key for each in await store.list()] == [b"heir"]
        assert await contents(store, b"heir") == expected(heir, make)
        await whole(store)


async def test_what_could_never_fit_evicts_nothing(tmp_path: Path) -> None:
    make = Conversations(page_size=1_000_000)
    async with await open_store(tmp_path / "s", 8) as store:
        await put(store, MAKE.manifest(b"small", range(20)))
        huge = make.manifest(b"huge", range(2000, 2040))
        async with store.put(huge, incoming_bytes=make.total(huge)) as put_:
            assert put_.outcome is PutOutcome.TOO_LARGE
        assert [each.key for each in await store.list()] == [b"small"]
        assert (await store.stats()).counters.puts == {"stored": 1, "too_large": 1}


async def test_a_put_left_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    manifest = MAKE.manifest(b"a", range(20))
    async with await open_store(tmp_path / "s", commit_mib=1) as store:
        with pytest.raises(RuntimeError, match="caller's own"):
            async with store.put(manifest) as put_:
                for index in put_.missing[:5]:
                    await put_.write(index, MAKE.data(manifest.pages[index]))
                await put_._flush()
                assert (await store.stats()).pages == 5
                raise RuntimeError("caller's own")
        stats = await store.stats()
        assert (stats.pages, stats.pending, stats.counters.puts) == (0, 0, {"cancelled": 1})
        await whole(store)


async def test_a_cancelled_caller_disturbs_nobody(tmp_path: Path) -> None:
    make = Conversations(page_size=1_000_000)
    async with await open_store(tmp_path / "s", 256) as store:
        for delay in (0.0, 0.001, 0.003, 0.01, 0.02):
            task = asyncio.create_task(put(store, make.manifest(b"a", range(40)), make))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        other = make.manifest(b"b", range(500, 508))
        assert await put(store, other, make) is PutOutcome.STORED
        assert (await store.stats()).pages == len(other.pages)
        assert not store._shared.pages and not store._shared.conversations
        await whole(store)


async def test_two_puts_at_once_share_what_is_equal(tmp_path: Path) -> None:
    one, two = MAKE.manifest(b"a", range(24)), MAKE.manifest(b"b", [*range(20), 9, 9, 9, 9])
    async with await open_store(tmp_path / "s") as store, store.put(one) as first, store.put(two) as second:
        for index in range(len(one.pages)):
            await first.write(index, MAKE.data(one.pages[index]))
            await second.write(index, MAKE.data(two.pages[index]))
        assert await second.commit() is PutOutcome.STORED
        assert await first.commit() is PutOutcome.STORED
        assert await contents(store, b"a") == expected(one)
        assert await contents(store, b"b") == expected(two)
        await whole(store)


async def test_a_manifest_without_its_pages_is_refused(tmp_path: Path) -> None:
    manifest = MAKE.manifest(b"a", range(20))
    async with await open_store(tmp_path / "s") as store:
        for left_out in (0, 3, len(manifest.pages) - 1):
            async with store.put(manifest) as put_:
                for index in put_.missing:
                    if index != left_out:
                        await put_.write(index, MAKE.data(manifest.pages[index]))
                assert await put_.commit() is PutOutcome.INCOMPLETE
            assert await store.get(b"a") is None
            assert (await store.stats()).pages == 0
        await whole(store)


async def test_a_conversation_can_take_the_place_of_others(tmp_path: Path) -> None:
    async with await open_store(tmp_path / "s") as store:
        await put(store, MAKE.manifest(b"turn 1", range(8)))
        later = MAKE.manifest(b"turn 2", range(16))
        async with store.put(later, instead_of=[b"turn 1", b"unknown"]) as put_:
            for index in put_.missing:
                await put_.write(index, MAKE.data(later.pages[index]))
            await put_.commit()
        assert [each.key for each in await store.list()] == [b"turn 2"]
        await whole(store)


async def test_a_second_opener_is_refused_with_the_owners_pid_and_takes_over_later(tmp_path: Path) -> None:
    clock = Clock()
    first = await open_store(tmp_path / "s")
    await put(first, MAKE.manifest(b"a", range(8)))
    async with await open_store(tmp_path / "s", clock=clock) as second:
        assert second.state.reason is Reason.OWNED
        assert f"pid {os.getpid()}" in str(second.state)
        assert await second.get(b"a") is None
        assert await put(second, MAKE.manifest(b"b", range(8))) is PutOutcome.DEGRADED
        await first.close()
        await second.tick()
        assert second.state.reason is Reason.OWNED  # not yet time to try again
        clock.time += 1
        await second.tick()
        assert second.state.reason is None
        assert await second.get(b"a") is not None


async def test_files_are_private(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        async with await open_store(tmp_path / "s") as store:
            await put(store, MAKE.manifest(b"a", range(8)))
            await store.compact()
            modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in (tmp_path / "s").iterdir()}
            assert modes == {"lock": 0o600, "store.mdb": 0o600, "store.mdb-lock": 0o600}
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    finally:
        os.umask(umask)


async def test_dropping_everything_frees_the_disk_and_the_text(tmp_path: Path) -> None:
    make = Conversations(page_size=100_000)
    secret = replace(make.manifest(b"a", range(40)), extra=b"planted words")
    async with await open_store(tmp_path / "s") as store:
        await put(store, secret, make)
        await store.pin(b"a")
        assert b"planted words" in (tmp_path / "s/store.mdb").read_bytes()
        assert await store.drop_all() == 1
        assert b"planted words" not in (tmp_path / "s/store.mdb").read_bytes()
        assert (await store.stats()).file_bytes < 200_000
        assert await put(store, secret, make) is PutOutcome.STORED
        await whole(store)


async def test_compaction_happens_by_itself_when_idle_and_wasteful(tmp_path: Path) -> None:
    clock = Clock()
    make = Conversations(page_size=300_000)
    async with await open_store(tmp_path / "s", clock=clock, compact_least_mib=1) as store:
        kept = make.manifest(b"kept", range(8))
        await put(store, make.manifest(b"gone", range(100, 140)), make)
        await put(store, kept, make)
        await store.drop(b"gone")
        before = (await store.stats()).file_bytes
        await store.tick()
        assert (await store.stats()).file_bytes == before
        clock.time += 61
        await store.tick()
        stats = await store.stats()
        assert (stats.counters.compactions, str(stats.state)) == (1, "ok")
        assert stats.file_bytes < stats.live_bytes + 100_000 < before
        assert await contents(store, b"kept") == expected(kept, make)
        clock.time += 61
        await store.tick()
        assert (await store.stats()).counters.compactions == 1
        await whole(store)


async def test_the_budget_can_be_changed_while_it_runs(tmp_path: Path) -> None:
    make = Conversations(page_size=400_000)
    async with await open_store(tmp_path / "s", 16) as store:
        for number in range(8):
            await put(store, make.manifest(b"%d" % number, range(100 * number, 100 * number + 8)), make)
        count = len(await store.list())
        assert count > 3
        await store.resize(6)
        stats = await store.stats()
        assert stats.live_bytes <= stats.budget_bytes == 6 << 20
        assert 0 < stats.conversations < count
        await store.resize(64)
        for number in range(20):
            assert (
                await put(store, make.manifest(b"%d" % number, range(100 * number, 100 * number + 8)), make) == "stored"
            )
        assert (await store.stats()).conversations == 20
        with pytest.raises(ValueError, match="max_mib"):
            await store.resize(0)
        await whole(store)


async def test_a_clock_set_back_neither_breaks_nor_preserves(tmp_path: Path) -> None:
    clock = Clock()
    make = Conversations(page_size=200_000)
    async with await open_store(tmp_path / "s", 8, clock=clock, half_life_s=10) as store:
        clock.wall_offset += 1e9
        await put(store, make.manifest(b"future", range(20)), make)
        clock.wall_offset -= 1e9 + 5000
        for number in range(12):
            clock.time += 20
            key, base = b"%d" % number, 1000 * number
            assert await put(store, make.manifest(key, range(base, base + 20)), make) is PutOutcome.STORED
        keys = {each.key for each in await store.list()}
        assert b"future" not in keys
        assert b"11" in keys
        await whole(store)


async def test_a_closed_store_says_no(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "s")
    await store.close()
    await store.close()
    assert store.state.reason is Reason.CLOSED
    assert await store.get(b"a") is None
    assert await put(store, MAKE.manifest(b"a", range(8))) is PutOutcome.DEGRADED
    assert await store.list() == []
    assert not await store.pin(b"a")
    assert await store.drop_all() == 0
    assert not (await store.verify()).sound
    await store.tick()
    assert store.state.reason is Reason.CLOSED


async def test_it_tends_itself(tmp_path: Path) -> None:
    ticks = 0

    async def sleep(_seconds: float) -> None:
        nonlocal ticks
        ticks += 1
        await asyncio.sleep(0.001)

    async with await Store.open(tmp_path / "s", IDENTITY, Options(max_mib=8), sleep=sleep) as store:
        while ticks < 5:
            await asyncio.sleep(0.001)
    assert store.state.reason is Reason.CLOSED


@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("key of 31 bytes", lambda: PageRef(PageKind.MAIN, bytes(31))),
        ("conversation key of 0", lambda: Manifest(b"", IDENTITY, [], [])),
        ("identity ''", lambda: Manifest(b"a", "", [], [])),
        ("twice", lambda: Manifest(b"a", IDENTITY, [], [PageRef(PageKind.MAIN, bytes(32))] * 2)),
        ("parent", lambda: Manifest(b"a", IDENTITY, [], [PageRef(PageKind.TAIL, bytes(32), b"x" * 32)])),
        ("cost", lambda: Manifest(b"a", IDENTITY, [], [], float("nan"))),
        ("max_mib", lambda: Options(max_mib=0)),
        ("chunk_kib", lambda: Options(max_mib=64, chunk_kib=4096)),
    ],
)
def test_wrong_arguments_are_named(what: str, make: object) -> None:
    with pytest.raises(ValueError, match=what):
        make()  # type: ignore[operator]
