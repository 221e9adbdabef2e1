"""Damages copies of a store and looks what comes of it. Each look is a process of its own: none may end by a signal.

    python -m tests.store.rot DIRECTORY KIND SEED COUNT

KIND is one of DAMAGES. Prints what happened to how many; ends with 1 at the first broken promise.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from stratastore import PutOutcome, Store

from tests.store.crash import forked
from tests.store.support import Clock, Conversations, open_store, whole

MAKE = Conversations(page_size=20_000)
PAGE = 4096
SHARED = [MAKE.manifest(b"%d" % n, [*range(8), *range(100 * n, 100 * n + 10)]) for n in range(1, 5)]
CHUNK_KIB = 16


def flip_bit(data: bytearray, rng: random.Random) -> None:
    """One bit, anywhere behind LMDB's meta pages."""
    at = rng.randrange(2 * PAGE, len(data))
    data[at] ^= 1 << rng.randrange(8)


def zero_page(data: bytearray, rng: random.Random) -> None:
    """One page of the file, as a lost write leaves it."""
    at = rng.randrange(len(data) // PAGE) * PAGE
    data[at : at + PAGE] = bytes(PAGE)


def truncate(data: bytearray, rng: random.Random) -> None:
    """Anywhere."""
    del data[rng.randrange(len(data)) :]


def swap_pages(data: bytearray, rng: random.Random) -> None:
    """Two pages of the file change places."""
    one, two = (rng.randrange(len(data) // PAGE) * PAGE for _ in range(2))
    data[one : one + PAGE], data[two : two + PAGE] = data[two : two + PAGE], data[one : one + PAGE]


def scribble(data: bytearray, rng: random.Random) -> None:
    """Noise over up to a page, anywhere."""
    at = rng.randrange(len(data))
    noise = rng.randbytes(min(rng.randrange(1, PAGE), len(data) - at))
    data[at : at + len(noise)] = noise


DAMAGES: dict[str, Callable[[bytearray, random.Random], None]] = {
    "bit": flip_bit,
    "zero": zero_page,
    "cut": truncate,
    "swap": swap_pages,
    "noise": scribble,
}


async def make(path: Path) -> None:
    """A store with conversations that share a prefix, some garbage, and a history of changes."""
    async with await open_store(path, chunk_kib=CHUNK_KIB, clock=Clock()) as store:
        for manifest in (MAKE.manifest(b"gone", range(5000, 5030)), *SHARED):
            assert await store.put_conversation(manifest, MAKE.data) is PutOutcome.STORED
        await store.drop(b"gone")


async def look(path: Path, tally: Callable[[str], None]) -> None:
    """Whatever is found is right; the store works, now and after a restart."""
    clock = Clock()
    async with await open_store(path, chunk_kib=CHUNK_KIB, clock=clock) as store:
        states = set()
        for manifest in SHARED:
            found = await store.get(manifest.key)
            if found is None:
                states.add("lost")
                continue
            assert found.manifest == manifest
            pages = [data async for _, data in store.read_pages(manifest.pages)]
            assert all(data in (None, MAKE.data(ref)) for ref, data in zip(manifest.pages, pages, strict=True))
            states.add("hole" if None in pages else "whole")
        tally("+".join(sorted(states)))
        await store.verify()
        clock.time += 100
        await store.tick()
        assert str(store.state) == "ok"
        await whole(store)
        await heals(store)
    async with await open_store(path, chunk_kib=CHUNK_KIB, clock=clock) as store:
        for manifest in SHARED:
            pages = [data async for _, data in store.read_pages(manifest.pages)]
            assert pages == [MAKE.data(ref) for ref in manifest.pages]
        assert (await whole(store)).hollow_pages == 0


async def heals(store: Store) -> None:
    """Storing again what is held in memory makes good what was lost."""
    for manifest in SHARED:
        assert await store.put_conversation(manifest, MAKE.data) is PutOutcome.STORED


def one(directory: Path, original: bytes, kind: str, seed: int, log: Path) -> bool:
    rng = random.Random(seed)
    data = bytearray(original)
    DAMAGES[kind](data, rng)
    path = directory / "damaged"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(directory / "original", path)
    (path / "store.mdb").write_bytes(data)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tally(state: str) -> None:
        os.write(descriptor, state.encode() + b"\n")

    status = forked(lambda: look(path, tally))
    os.close(descriptor)
    if status:
        print(f"{kind}, seed {seed}: wait status {status}, signal {status & 127}")
    return not status


def main() -> int:
    directory, kind, seed, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    asyncio.run(make(directory / "original"))
    original = (directory / "original" / "store.mdb").read_bytes()
    log = directory / "log"
    for number in range(count):
        if not one(directory, original, kind, seed + number, log):
            return 1
    tally = Counter(log.read_text().split())
    print(f"{kind}:", ", ".join(f"{state} {number}" for state, number in sorted(tally.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
