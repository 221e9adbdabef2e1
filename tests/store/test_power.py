"""The power fails in a commit: sectors that were not yet synced are there, torn or not, in any order.

LMDB writes a commit's pages, syncs, then writes its meta page, which lies in one sector. So a power cut leaves the file
of the commit before with any of the sectors of the new one (but not the meta page), or the new one whole. The file is
kept at each commit of a store's life; the states between two are made from the sectors that differ.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from stratastore import Manifest, PutOutcome

from tests.store.crash import tokens_of
from tests.store.support import Clock, Conversations, open_store, whole

MAKE = Conversations(page_size=4_000)
SECTOR = 512
META_PAGES = 2 * 4096


class Recorder:
    """Keeps the file's bytes at each commit, and what the disk is asked to do between."""

    def __init__(self, path: Path) -> None:
        self._path = path / "store.mdb"
        self.files: list[bytes] = []

    def __call__(self, step: str) -> None:
        if step == "committed":
            self.files.append(self._path.read_bytes())


async def live(path: Path, recorder: Recorder, rng: random.Random, operations: int) -> None:
    async with await open_store(path, 4, clock=Clock(), trip=recorder, commit_mib=1, chunk_kib=16) as store:
        for _ in range(operations):
            key = b"%d" % rng.randrange(6)
            if rng.random() < 0.25:
                await store.drop(key)
            else:
                manifest = MAKE.manifest(key, tokens_of(rng))
                assert await store.put_conversation(manifest, MAKE.data) is PutOutcome.STORED


def torn(before: bytes, after: bytes, rng: random.Random) -> bytes:
    """`before` with some sectors of `after`; the file may have got its new length or not."""
    size = rng.choice([len(before), len(after), max(len(before), len(after))])
    data = bytearray(before[:size].ljust(size, b"\0"))
    share = rng.choice([0.1, 0.5, 0.9, 1.0])
    for at in range(META_PAGES, min(len(after), size), SECTOR):
        if after[at : at + SECTOR] != before[at : at + SECTOR] and rng.random() < share:
            data[at : at + SECTOR] = after[at : at + SECTOR].ljust(SECTOR, b"\0")
    return bytes(data)


async def found_in(path: Path, template: Path, data: bytes) -> list[Manifest]:
    """Open a store of these bytes; what it has, all of it checked."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    (path / "lock").write_bytes((template / "lock").read_bytes())
    (path / "store.mdb").write_bytes(data)
    (path / "store.mdb.new").write_bytes(b"half a compaction")
    manifests = []
    async with await open_store(path, 4, chunk_kib=16) as store:
        assert str(store.state) == "ok"
        for each in await store.list():
            found = await store.get(each.key)
            assert found is not None
            async for ref, page in store.read_pages(found.manifest.pages):
                assert page == MAKE.data(ref)
            manifests.append(found.manifest)
        assert (await whole(store)).hollow_pages == 0
        stats = await store.stats()
        assert (stats.counters.discarded_files, stats.counters.recounts, stats.pending) == (0, 0, 0)
    assert not (path / "store.mdb.new").exists()
    return manifests


async def cut_power(path: Path, seed: int, operations: int, states: int) -> None:
    rng = random.Random(seed)
    recorder = Recorder(path / "life")
    await live(path / "life", recorder, rng, operations)
    assert len(recorder.files) > operations
    for before, after in zip(recorder.files, recorder.files[1:], strict=False):
        expected = await found_in(path / "cut", path / "life", before)
        for _ in range(states):
            assert await found_in(path / "cut", path / "life", torn(before, after, rng)) == expected


async def test_some_power_cuts(quick_path: Path) -> None:
    await cut_power(quick_path, seed=1, operations=7, states=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
async def test_many_power_cuts(quick_path: Path, seed: int) -> None:
    await cut_power(quick_path, seed, operations=60, states=8)
