"""Bit rot, torn writes and swaps: what is damaged is a miss, what is not still hits, wrong bytes never appear."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest
from stratastore import PageKind, PageRef, PutOutcome, Store
from stratastore.medium import DATABASES

from tests.store import rot
from tests.store.support import Clock, contents, open_store, whole

ROOT = Path(__file__).parents[2]
MAKE, SHARED = rot.MAKE, rot.SHARED
Raw = dict[bytes, "lmdb._Database"]


def rot_many(directory: Path, kind: str, seed: int, count: int) -> str:
    command = [sys.executable, "-m", "tests.store.rot", str(directory), kind, str(seed), str(count)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("kind", rot.DAMAGES)
def test_a_damaged_file(quick_path: Path, kind: str) -> None:
    assert rot_many(quick_path, kind, seed=1, count=10).startswith(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", rot.DAMAGES)
def test_a_file_damaged_anywhere(quick_path: Path, kind: str) -> None:
    rot_many(quick_path, kind, seed=100_000, count=700)


@contextmanager
def raw(path: Path) -> Iterator[tuple[lmdb.Transaction[bytes], Raw]]:
    """The store's file behind its back, while it is closed."""
    with lmdb.open(str(path / "store.mdb"), subdir=False, max_dbs=len(DATABASES), map_size=1 << 28) as environment:
        handles = {name: environment.open_db(name) for name in DATABASES}
        with environment.begin(write=True) as txn:
            yield txn, handles


def entries(path: Path) -> list[tuple[bytes, bytes, bytes]]:
    with raw(path) as (txn, handles):
        return [(name, bytes(key), bytes(value)) for name in DATABASES for key, value in txn.cursor(db=handles[name])]


def flip(value: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(value)
    damaged[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def shorten(value: bytes, rng: random.Random) -> bytes:
    return value[: rng.randrange(len(value))]


def lengthen(value: bytes, rng: random.Random) -> bytes:
    return value + rng.randbytes(rng.randrange(1, 40))


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": flip,
    "shorten": shorten,
    "lengthen": lengthen,
}


async def survives(path: Path) -> set[bytes]:
    """Open a store whose entries were changed, see that nothing is wrong with what it gives; keys that are whole."""
    clock, found = Clock(), set()
    async with await open_store(path, chunk_kib=rot.CHUNK_KIB, clock=clock) as store:
        for manifest in SHARED:
            pages = await contents(store, manifest.key)
            if pages is None:
                continue
            assert all(data in (None, MAKE.data(ref)) for ref, data in zip(manifest.pages, pages, strict=True))
            if None not in pages:
                found.add(manifest.key)
        await store.verify()
        await whole(store)
        for manifest in SHARED:
            assert await store.put_conversation(manifest, MAKE.data) is PutOutcome.STORED
            assert await contents(store, manifest.key) == [MAKE.data(ref) for ref in manifest.pages]
        assert (await whole(store)).hollow_pages == 0
        assert str(store.state) == "ok"
    return found


async def damaged_entries(path: Path, change: str, stride: int, offset: int) -> None:
    rng = random.Random(offset)
    await rot.make(path / "original")
    everything = entries(path / "original")
    assert {name for name, _, _ in everything} == set(DATABASES) - {b"pending"}
    kept = 0
    for name, key, value in everything[offset::stride]:
        if not value:
            continue
        copy = path / "copy"
        shutil.copytree(path / "original", copy)
        with raw(copy) as (txn, handles):
            txn.put(key, CHANGES[change](value, rng), db=handles[name])
        kept += len(await survives(copy))
        shutil.rmtree(copy)
    assert kept > len(everything) // stride  # damage to one leaves most of the others


@pytest.mark.parametrize("change", CHANGES)
async def test_some_damaged_entries(quick_path: Path, change: str) -> None:
    await damaged_entries(quick_path, change, stride=17, offset=len(change))


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
async def test_every_damaged_entry(quick_path: Path, change: str) -> None:
    await damaged_entries(quick_path, change, stride=1, offset=0)


@pytest.mark.parametrize("database", [b"chunks", b"pages", b"conversations", b"manifests"])
async def test_swapped_entries(quick_path: Path, database: bytes) -> None:
    await rot.make(quick_path)
    keys = [key for name, key, _ in entries(quick_path) if name == database]
    for one, two in ((0, 1), (0, -1), (1, 2)):
        with raw(quick_path) as (txn, handles):
            first, second = (bytes(txn.get(keys[index], b"", db=handles[database])) for index in (one, two))
            txn.put(keys[one], second, db=handles[database])
            txn.put(keys[two], first, db=handles[database])
        await survives(quick_path)
        keys = [key for name, key, _ in entries(quick_path) if name == database]


@pytest.mark.parametrize("database", [b"chunks", b"pages", b"conversations", b"manifests", b"meta"])
async def test_missing_and_surplus_entries(quick_path: Path, database: bytes) -> None:
    for place in (0, -1):
        path = quick_path / str(place)
        await rot.make(path)
        with raw(path) as (txn, handles):
            keys = [bytes(key) for key in txn.cursor(db=handles[database]).iternext(keys=True, values=False)]
            value = bytes(txn.get(keys[place], b"", db=handles[database]))
            txn.delete(keys[place], db=handles[database])
            txn.put(keys[place][:-1] + bytes((keys[place][-1] ^ 1,)), value, db=handles[database])
        await survives(path)


async def largest(store: Store, path: Path) -> tuple[PageRef, int]:
    """The first checkpoint of the first conversation, and where its bytes lie in the file."""
    ref = next(ref for ref in SHARED[0].pages if ref.kind is PageKind.CHECKPOINT)
    at = (path / "store.mdb").read_bytes().find(MAKE.data(ref)[:1000])
    assert at > 0
    return ref, at


async def test_rot_under_the_running_store(tmp_path: Path) -> None:
    await rot.make(tmp_path)
    async with await open_store(tmp_path, chunk_kib=rot.CHUNK_KIB) as store:
        ref, at = await largest(store, tmp_path)
        with (tmp_path / "store.mdb").open("r+b") as file:
            file.seek(at + 100)
            file.write(b"rotten")
        pages = await contents(store, SHARED[0].key)
        assert pages is not None
        assert [data is None for data in pages] == [page == ref for page in SHARED[0].pages]
        await store.tick()
        found = await store.get(SHARED[0].key)
        assert found is not None
        assert found.present.count(False) == 1
        assert store._shared.counters.bad_pages == 1
        other = await contents(store, SHARED[1].key)  # shares the damaged checkpoint, and has the rest
        assert other is not None
        assert other.count(None) == 1
        verdict = await whole(store)
        assert (verdict.hollow_pages, verdict.bad_pages) == (1, 0)
        async with store.put(SHARED[1]) as put:
            assert [SHARED[1].pages[index] for index in put.missing] == [ref]
            await put.write(put.missing[0], MAKE.data(ref))
            assert await put.commit() is PutOutcome.STORED
        assert await contents(store, SHARED[0].key) == [MAKE.data(page) for page in SHARED[0].pages]
        assert (await whole(store)).hollow_pages == 0


async def test_a_value_whose_head_is_wrong_is_not_given_to_lmdb_to_free(tmp_path: Path) -> None:
    """LMDB would believe the head, and free another page's pages: it is better to begin anew."""
    await rot.make(tmp_path)
    async with await open_store(tmp_path, chunk_kib=rot.CHUNK_KIB) as store:
        data = (tmp_path / "store.mdb").read_bytes()
        one, two = (data.find(MAKE.data(ref)[:1000]) - 16 for ref in SHARED[0].pages[:3:2])
        assert one % 4096 == two % 4096 == 0
        with (tmp_path / "store.mdb").open("r+b") as file:
            file.seek(one)
            file.write(data[two : two + 16] + b"rotten")
        pages = await contents(store, SHARED[0].key)
        assert pages is not None
        assert pages[0] is None
        await store.tick()
        counters = (await store.stats()).counters
        assert (counters.bad_pages, counters.discarded_files, str(store.state)) == (1, 1, "ok")
        assert await store.list() == []
        assert await store.put_conversation(SHARED[0], MAKE.data) is PutOutcome.STORED
        await whole(store)


async def test_a_page_lost_during_a_put_makes_it_incomplete(tmp_path: Path) -> None:
    await rot.make(tmp_path)
    async with await open_store(tmp_path, chunk_kib=rot.CHUNK_KIB) as store:
        await store.drop(SHARED[1].key)
        async with store.put(SHARED[1]) as put:
            ref, at = await largest(store, tmp_path)
            assert ref in SHARED[1].pages
            assert ref not in [SHARED[1].pages[index] for index in put.missing]
            with (tmp_path / "store.mdb").open("r+b") as file:
                file.seek(at + 100)
                file.write(b"rotten")
            assert [data async for _, data in store.read_pages([ref])] == [None]
            for index in put.missing:
                await put.write(index, MAKE.data(SHARED[1].pages[index]))
            assert await put.commit() is PutOutcome.INCOMPLETE
        assert await store.get(SHARED[1].key) is None
        await whole(store)
