"""Any order of operations, beside a dictionary: once with room for everything, once with eviction."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar
from unittest import TestCase

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stratastore import Manifest, PutOutcome, Store

from tests.store.support import IDENTITY, OTHER_IDENTITY, Clock, Conversations, open_store, whole

T = TypeVar("T")
KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])
TOKENS = st.lists(st.sampled_from([0, 1]), max_size=18)  # few, so that prefixes are shared
IDENTITIES = st.sampled_from([IDENTITY, OTHER_IDENTITY])
SHM = Path("/dev/shm")


class StoreMachine(RuleBasedStateMachine):
    """`model` is what must be there; `pinned` what must not go by itself."""

    MAX_MIB = 64
    PAGE_SIZE = 3_000
    EVICTS = False

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.path = Path(tempfile.mkdtemp(prefix="strata-test-", dir=SHM if SHM.is_dir() else None))
        self.clock = Clock()
        self.model: dict[bytes, Manifest] = {}
        self.pinned: set[bytes] = set()
        self.identity = IDENTITY
        self.store = self.do(self.reopened())

    def do(self, work: Awaitable[T]) -> T:
        async def run() -> T:
            return await work

        return self.loop.run_until_complete(run())

    async def reopened(self) -> Store:
        return await open_store(
            self.path / "s", self.MAX_MIB, clock=self.clock, identity=self.identity, compact_least_mib=0
        )

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.do(self.store.close())
            self.loop.close()
            shutil.rmtree(self.path)

    def make(self, identity: str | None = None) -> Conversations:
        return Conversations(self.PAGE_SIZE, identity or self.identity)

    def forget_evicted(self) -> None:
        """What eviction took, which must not have been pinned."""
        if self.EVICTS:
            there = {each.key for each in self.do(self.store.list())}
            assert self.pinned & self.model.keys() <= there
            self.model = {key: manifest for key, manifest in self.model.items() if key in there}

    @rule(key=KEYS, tokens=TOKENS)
    def put(self, key: bytes, tokens: list[int]) -> None:
        manifest = self.make().manifest(key, tokens)
        outcome = self.do(self.store.put_conversation(manifest, self.make().data))
        assert outcome is PutOutcome.STORED or (self.EVICTS and outcome is PutOutcome.NO_ROOM)
        self.forget_evicted()
        if outcome is PutOutcome.STORED:
            self.model[key] = manifest
        else:
            assert self.pinned

    @rule(key=KEYS, tokens=TOKENS, old=KEYS)
    def supersede(self, key: bytes, tokens: list[int], old: bytes) -> None:
        manifest = self.make().manifest(key, tokens)

        async def work() -> PutOutcome:
            async with self.store.put(manifest, instead_of=[old]) as put:
                for index in put.missing:
                    await put.write(index, self.make().data(manifest.pages[index]))
                return await put.commit()

        if self.do(work()) is PutOutcome.STORED:
            self.model.pop(old, None)
            if old != key:
                self.pinned.discard(old)
            self.model[key] = manifest
        self.forget_evicted()

    @rule(key=KEYS, tokens=TOKENS, left_out=st.integers(0, 5))
    def leave_a_put(self, key: bytes, tokens: list[int], left_out: int) -> None:
        manifest = self.make().manifest(key, tokens)

        async def work() -> None:
            async with self.store.put(manifest) as put:
                for index in put.missing[: len(put.missing) - left_out]:
                    await put.write(index, self.make().data(manifest.pages[index]))
                await put._flush()

        self.do(work())
        self.forget_evicted()

    @rule(key=KEYS)
    def get(self, key: bytes) -> None:
        found = self.do(self.store.get(key))
        expected = self.model.get(key)
        if expected is None or expected.identity != self.identity:
            assert found is None
            return
        assert found is not None
        assert found.manifest == expected
        assert found.conversation.pinned == (key in self.pinned)

        async def read() -> list[bytes | None]:
            return [data and bytes(data) async for _, data in self.store.read_pages(found.manifest.pages)]

        assert self.do(read()) == [self.make().data(ref) for ref in expected.pages]

    @rule(key=KEYS, pin=st.booleans())
    def pin(self, key: bytes, pin: bool) -> None:
        known = self.do(self.store.pin(key) if pin else self.store.unpin(key))
        assert known == (key in self.model)
        self.pinned.discard(key)
        if known and pin:
            self.pinned.add(key)

    @rule(key=KEYS)
    def drop(self, key: bytes) -> None:
        assert self.do(self.store.drop(key)) == (key in self.model)
        self.model.pop(key, None)
        self.pinned.discard(key)

    @rule(pinned=st.booleans())
    def prune(self, pinned: bool) -> None:
        stale = {
            key
            for key, manifest in self.model.items()
            if manifest.identity != self.identity and (pinned or key not in self.pinned)
        }
        assert self.do(self.store.prune(pinned=pinned)) == len(stale)
        self.model = {key: manifest for key, manifest in self.model.items() if key not in stale}
        self.pinned -= stale

    @rule(identity=IDENTITIES)
    def another_model(self, identity: str) -> None:
        self.identity = identity
        self.do(self.store.set_identity(identity))

    @rule()
    def restart(self) -> None:
        self.do(self.store.close())
        self.store = self.do(self.reopened())

    @rule()
    def compact(self) -> None:
        assert self.do(self.store.compact())

    @rule(seconds=st.sampled_from([0, 1, 100]))
    def tick(self, seconds: float) -> None:
        self.clock.time += seconds
        self.do(self.store.tick())

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def agrees(self) -> None:
        assert str(self.store.state) == "ok"
        assert {each.key for each in self.do(self.store.list())} == self.model.keys()
        stats = self.do(self.store.stats())
        assert stats.pages == len({ref.name for manifest in self.model.values() for ref in manifest.pages})
        assert stats.pending == 0
        assert stats.live_bytes <= stats.budget_bytes
        assert stats.file_bytes <= 1.25 * stats.budget_bytes
        self.do(whole(self.store))


class EvictingMachine(StoreMachine):
    """The same with room for two or three conversations."""

    MAX_MIB = 4
    PAGE_SIZE = 250_000
    EVICTS = True


def case(machine: type[StoreMachine], examples: int, steps: int) -> type[TestCase]:
    """A test of the machine; the quick ones are the same every time."""
    test = type(machine.__name__, (machine.TestCase,), {})
    test.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=examples < 100,
    )
    return test


TestWithRoom = case(StoreMachine, 15, 25)
TestWithEviction = case(EvictingMachine, 15, 25)
TestLongWithRoom = pytest.mark.slow(case(StoreMachine, 300, 60))
TestLongWithEviction = pytest.mark.slow(case(EvictingMachine, 300, 60))
