"""Conversations to store, an injected clock, and the walk that says whether a store is whole."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from stratastore import Manifest, Options, PageKind, PageRef, Store, Verdict
from stratastore.keeper import Shared

IDENTITY = "0123456789abcdef0123456789abcdef"
OTHER_IDENTITY = "f" * 32
PAGE_TOKENS = 4  # of these tests; the store does not know
ROOT = bytes(32)


class Clock:
    """Monotonic and wall time that move when told to."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.wall_offset = 1_700_000_000.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time + self.wall_offset

    def shared(self) -> Shared:
        """What `Store.open` takes."""
        return Shared(Options(max_mib=4), "", now=self.now, wall=self.wall)


def options(max_mib: int = 64, **changes: object) -> Options:
    """Options without a task of their own."""
    values: dict[str, object] = {"max_mib": max_mib, "tick_s": None, **changes}
    return Options(**values)  # type: ignore[arg-type]


async def open_store(
    path: Path,
    max_mib: int = 64,
    *,
    clock: Clock | None = None,
    identity: str = IDENTITY,
    trip: Callable[[str], None] | None = None,
    **changes: object,
) -> Store:
    """A store with a clock of its own."""
    shared = (clock or Clock()).shared()
    extra = {"trip": trip} if trip else {}
    return await Store.open(path, identity, options(max_mib, **changes), shared=shared, **extra)


def page_key(identity: str, tokens: Sequence[int]) -> bytes:
    """A chain key as the daemon makes it: a prefix has one key."""
    key = hashlib.blake2b(identity.encode(), digest_size=32).digest()
    for at in range(0, len(tokens), PAGE_TOKENS):
        part = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + PAGE_TOKENS])
        key = hashlib.blake2b(key + part, digest_size=32).digest()
    return key


@functools.lru_cache(1000)
def page_bytes(ref: PageRef, size: int) -> bytes:
    """The content of a page: a function of its name, so that equal names mean equal bytes."""
    return random.Random(ref.name).randbytes(size)


class Conversations:
    """Makes manifests over token lists; every kind of page, sizes a function of kind and position."""

    def __init__(self, page_size: int = 10_000, identity: str = IDENTITY) -> None:
        self.page_size = page_size
        self.identity = identity

    def refs(self, tokens: Sequence[int]) -> list[PageRef]:
        """Main and drafter rows for each full page, a checkpoint at every second one, a tail."""
        found: list[PageRef] = []
        parent: bytes | None = None
        for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
            key = page_key(self.identity, tokens[:end])
            found.append(PageRef(PageKind.MAIN, key, parent, end))
            found.append(PageRef(PageKind.DRAFTER, key, key, end))
            if end // PAGE_TOKENS % 2 == 0:
                found.append(PageRef(PageKind.CHECKPOINT, key, key, end))
            parent = key
        if len(tokens) % PAGE_TOKENS:
            found.append(PageRef(PageKind.TAIL, page_key(self.identity, tokens), parent, len(tokens)))
        return found

    def manifest(self, key: bytes, tokens: Sequence[int], cost: float = 0.0) -> Manifest:
        return Manifest(key, self.identity, tokens, self.refs(tokens), cost, b"extra of " + key)

    def size(self, ref: PageRef) -> int:
        scale = {PageKind.MAIN: 8, PageKind.DRAFTER: 1, PageKind.TAIL: 4, PageKind.CHECKPOINT: 16}[ref.kind]
        return self.page_size * scale // 8 + ref.position % 7

    def data(self, ref: PageRef) -> bytes:
        return page_bytes(ref, self.size(ref))

    def total(self, manifest: Manifest) -> int:
        return sum(self.size(ref) for ref in manifest.pages)


async def contents(store: Store, key: bytes) -> list[bytes | None] | None:
    """Every page of a conversation, None for those that are not there; None if there is no such conversation."""
    found = await store.get(key)
    if found is None:
        return None
    return [None if data is None else bytes(data) async for _, data in store.read_pages(found.manifest.pages)]


async def whole(store: Store) -> Verdict:
    """The full walk, which must find nothing."""
    verdict = await store.verify()
    assert verdict.sound, verdict.faults
    return verdict
