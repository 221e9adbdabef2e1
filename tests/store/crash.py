"""Kills writers of a store, at named points and at any time, and walks what they leave.

    python -m tests.store.crash DIRECTORY SEED KILLS

One process forks a child for each life and each walk, so that a life costs milliseconds; no store is ever open in the
process that forks. Prints one line for each broken promise and ends with 1 if there was any.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path

from stratastore import Manifest, PutOutcome, Store

from tests.store.support import Clock, Conversations, open_store

MAKE = Conversations(page_size=90_000)
POINTS = {  # and how often a life passes there, about
    "lock": 1, "check": 1, "lmdb open": 1, "begin": 27, "chunk": 47, "put": 300, "delete": 180, "manifest": 8,
    "commit": 27, "committed": 27, "evict": 2, "drop": 2, "sweep": 1, "copy": 1, "copied": 1, "swap": 1, "renamed": 1,
    "sync directory": 1,
}  # fmt: skip
ANY_TIME = "any time"
KEYS = 10
LIFE_OPERATIONS = 14


def tokens_of(rng: random.Random) -> list[int]:
    """A token list that shares a beginning with others."""
    stem = rng.choice([0, 1000, 2000])
    shared = rng.choice([4, 8, 12])
    return [*range(stem, stem + shared), *(rng.randrange(50) for _ in range(rng.randrange(18)))]


class Log:
    """What a life promised: lines that outlive it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, what: str, key: bytes, tokens: object = "") -> None:
        os.write(self._descriptor, f"{what}|{key.decode()}|{tokens}\n".encode())


def killer(point: str, turn: int) -> Callable[[str], None]:
    """A trip that ends this process the `turn`-th time it passes `point`."""
    left = turn

    def trip(step: str) -> None:
        nonlocal left
        if step == point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return trip


async def life(path: Path, log: Log, rng: random.Random, trip: Callable[[str], None], max_mib: int) -> None:
    """Random work on a store."""
    async with await open_store(path, max_mib, clock=Clock(), trip=trip) as store:
        assert str(store.state) == "ok", store.state
        for _ in range(LIFE_OPERATIONS):
            key = b"%d" % rng.randrange(KEYS)
            choice = rng.random()
            if choice < 0.7:
                await put(store, log, MAKE.manifest(key, tokens_of(rng)), leave=rng.random() < 0.15)
            elif choice < 0.85:
                log("drop", key)
                await store.drop(key)
            elif choice < 0.9:
                await store.compact()
            else:
                await store.get(key)


async def put(store: Store, log: Log, manifest: Manifest, leave: bool) -> None:
    """Put a conversation, or most of it."""
    async with store.put(manifest) as going:
        for index in going.missing:
            if leave and index == going.missing[-1]:
                await going._flush()
                return
            await going.write(index, MAKE.data(manifest.pages[index]))
        log("begin", manifest.key, list(manifest.tokens))
        if await going.commit() is PutOutcome.STORED:
            log("stored", manifest.key, list(manifest.tokens))


def promises(path: Path) -> dict[str, set[str]]:
    """For each key, the token lists that may be found: one if the last put was acknowledged; "" means none."""
    allowed: dict[str, set[str]] = {}
    for line in path.read_text().splitlines():
        what, key, tokens = line.split("|")
        before = allowed.get(key, {""})
        allowed[key] = {"stored": {tokens}, "begin": before | {tokens}, "drop": before | {""}}[what]
    return allowed


async def walk(path: Path, log: Path, max_mib: int, evicting: bool, trip: Callable[[str], None]) -> None:
    """Open what a life left and hold it to its promises."""
    async with await open_store(path, max_mib, trip=trip) as store:
        assert str(store.state) == "ok", store.state
        verdict = await store.verify()
        assert verdict.sound, verdict.faults
        assert verdict.hollow_pages == 0
        stats = await store.stats()
        assert stats.pending == 0
        assert stats.counters.discarded_files == 0
        assert stats.file_bytes <= 1.25 * stats.budget_bytes
        found: dict[str, str] = {}
        for each in await store.list():
            shown = await store.get(each.key)
            assert shown is not None
            manifest = shown.manifest
            assert list(manifest.pages) == MAKE.refs(manifest.tokens)
            found[each.key.decode()] = str(list(manifest.tokens))
            async for ref, data in store.read_pages(manifest.pages):
                assert data == MAKE.data(ref), "wrong bytes"
        for key, allowed in promises(log).items():
            assert found.get(key, "") in allowed | ({""} if evicting else set()), f"{key}: not what was acknowledged"


def forked(work: Callable[[], Coroutine[object, object, None]], kill_after_s: float | None = None) -> int:
    """Run `work` in a child; its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(work())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def one_kill(directory: Path, seed: int, killed: Counter[str]) -> bool:
    """One life that ends too early, perhaps a recovery that does too, and the walk. True: all promises kept."""
    rng = random.Random(seed)
    evicting = rng.random() < 0.6
    max_mib = 4 if evicting else 64
    path, log = directory / ("small" if evicting else "large"), directory / ("small.log" if evicting else "large.log")
    point = rng.choice([*POINTS, ANY_TIME, ANY_TIME, ANY_TIME])
    trip, after = killer(point, rng.randint(1, POINTS.get(point, 1))), None
    if point == ANY_TIME:
        after = rng.uniform(0.01, 0.25)
    status = forked(lambda: life(path, Log(log), rng, trip, max_mib), after)
    if status == signal.SIGKILL:
        killed[point] += 1
    elif status:
        print(f"seed {seed}: a life ended with {status}")
        return False
    if rng.random() < 0.3:  # a crash in the recovery from a crash
        again = killer(rng.choice(["begin", "delete", "commit", "sweep", "lmdb open"]), rng.randint(1, 4))
        forked(lambda: walk(path, log, max_mib, evicting, again))
    if forked(lambda: walk(path, log, max_mib, evicting, lambda _step: None)):
        print(f"seed {seed}: a broken promise after a kill at {point!r}")
        return False
    return True


def main() -> int:
    directory, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    killed: Counter[str] = Counter()
    while killed.total() < kills:
        if not one_kill(directory, seed, killed):
            return 1
        seed += 1
    print("killed:", ", ".join(f"{point} {count}" for point, count in sorted(killed.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
