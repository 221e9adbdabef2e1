"""One conversation as one file: there and back, and every file that will not do."""

from __future__ import annotations

import asyncio
import gc
import os
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stratastore import Manifest, PageKind, PageRef, PutOutcome, Store
from stratastore.portable import END, MAGIC, PortableError, Sum, examine, export, take_in
from stratastore.records import KIND_MANIFEST, manifest_record, seal

from tests.store.support import IDENTITY, OTHER_IDENTITY, Conversations, contents, open_store, whole

MADE = Conversations(page_size=900)
KEY = b"a conversation"
MOST = 1 << 24


@asynccontextmanager
async def stores(path: Path) -> AsyncIterator[tuple[Store, Store]]:
    """One with a conversation, one empty."""
    (path / "from").mkdir(exist_ok=True)
    (path / "to").mkdir(exist_ok=True)
    async with await open_store(path / "from") as full, await open_store(path / "to") as empty:
        manifest = MADE.manifest(KEY, range(11), cost=7.5)
        assert await full.put_conversation(manifest, MADE.data) is PutOutcome.STORED
        yield full, empty


async def exported(store: Store, path: Path) -> bytes:
    with path.open("wb") as file:
        contents = await export(store, KEY, file.fileno())
    assert contents is not None and path.stat().st_size == contents.file_bytes
    return path.read_bytes()


async def imported(store: Store, data: bytes, path: Path) -> PutOutcome:
    path.write_bytes(data)
    with path.open("rb") as file:
        return await take_in(store, await examine(file.fileno(), MOST))


async def refusal(store: Store, data: bytes, path: Path) -> str:
    """What is wrong with a file; the store is not touched."""
    before = await store.stats()
    with pytest.raises(PortableError) as caught:
        await imported(store, data, path)
    after = await store.stats()
    assert (after.pages, after.pending, after.live_bytes) == (before.pages, before.pending, before.live_bytes)
    assert await store.list() == [] and after.counters.commits == before.counters.commits
    return str(caught.value)


async def test_there_and_back(tmp_path: Path) -> None:
    async with stores(tmp_path) as (full, empty):
        data = await exported(full, tmp_path / "file")
        told: list[tuple[int, int]] = []
        with (tmp_path / "file").open("rb") as file:
            found = await examine(file.fileno(), MOST, lambda done, total: told.append((done, total)))
        assert told[-1] == (found.page_bytes, found.page_bytes) and len(told) == len(found.manifest.pages)
        assert (found.contents.key, found.contents.tokens, found.contents.identity) == (KEY, 11, IDENTITY)
        assert await imported(empty, data, tmp_path / "again") is PutOutcome.STORED
        assert await contents(empty, KEY) == await contents(full, KEY)
        one, two = await empty.show(KEY), await full.show(KEY)
        assert one is not None and two is not None
        assert one.manifest == two.manifest and one.conversation.hits == 1
        await whole(empty)
        assert await exported(empty, tmp_path / "third") == data
        assert await imported(empty, data, tmp_path / "again") is PutOutcome.STORED
        assert (await empty.stats()).counters.pages_written == len(found.manifest.pages)


async def test_through_a_pipe_at_its_readers_pace(tmp_path: Path) -> None:
    async with stores(tmp_path) as (full, _):
        big = Conversations(page_size=300_000).manifest(KEY, range(11))
        assert await full.put_conversation(big, Conversations(page_size=300_000).data) is PutOutcome.STORED
        expected = await exported(full, tmp_path / "file")
        reading, writing = os.pipe()
        got: list[bytes] = []
        with os.fdopen(reading, "rb") as pipe:
            thread = threading.Thread(target=lambda: got.append(pipe.read()))
            thread.start()
            assert await export(full, KEY, writing) is not None
            os.close(writing)
            await asyncio.to_thread(thread.join)
        assert got == [expected]


async def test_a_reader_that_leaves_ends_it(tmp_path: Path) -> None:
    async with stores(tmp_path) as (full, _):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            with pytest.raises(PortableError, match="cannot be written: Broken pipe"):
                await export(full, KEY, writing)
        finally:
            os.close(writing)


def open_files() -> list[str]:
    """Where our descriptors lead."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(link) for link in links if os.path.lexists(link))


async def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    async with stores(tmp_path) as (full, empty):
        data = await exported(full, tmp_path / "file")
        gc.collect()
        before = open_files()
        await refusal(empty, data[:-1], tmp_path / "bad")
        await imported(empty, data, tmp_path / "good")
        await exported(full, tmp_path / "file")
        gc.collect()  # pytest's own hold on the refusal
        assert open_files() == before


async def test_what_is_not_there_or_not_whole_is_not_exported(tmp_path: Path) -> None:
    async with stores(tmp_path) as (full, _):
        with (tmp_path / "file").open("wb") as file:
            assert await export(full, b"another", file.fileno()) is None
            ref = MADE.refs(range(11))[0]
            full._keeper.hollow(ref.name, 1)
            with pytest.raises(PortableError, match="1 of its"):
                await export(full, KEY, file.fileno())


async def test_descriptors_of_the_wrong_kind(tmp_path: Path) -> None:
    async with stores(tmp_path) as (full, empty):
        data = await exported(full, tmp_path / "file")
        with open("/dev/null", "r+b") as device, pytest.raises(PortableError, match="regular file or a pipe"):
            await export(full, KEY, device.fileno())
        with open("/dev/zero", "rb") as device, pytest.raises(PortableError, match="regular file only"):
            await examine(device.fileno(), MOST)
        with (tmp_path / "file").open("rb") as file, pytest.raises(PortableError, match="cannot be written: Bad file"):
            await export(full, KEY, file.fileno())
        with (tmp_path / "file").open("ab") as file, pytest.raises(PortableError, match="cannot be read: Bad file"):
            await examine(file.fileno(), MOST)
        assert (tmp_path / "file").read_bytes() == data and await empty.list() == []


# --- files that will not do


async def test_every_flipped_byte_is_found(quick_path: Path) -> None:
    async with stores(quick_path) as (full, empty):
        data = await exported(full, quick_path / "file")
        loop = asyncio.get_running_loop()

        def check(at: int, flip: int) -> None:
            bad = bytearray(data)
            bad[at] ^= flip
            asyncio.run_coroutine_threadsafe(refusal(empty, bytes(bad), quick_path / "bad"), loop).result(30)

        examples = settings(
            max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
        )
        last = len(data) - 1
        places = st.one_of(st.integers(0, last), st.integers(0, 200), st.integers(last - 60, last))
        await asyncio.to_thread(examples(given(places, st.integers(1, 255))(check)))
        assert await imported(empty, data, quick_path / "good") is PutOutcome.STORED


async def test_every_other_length_is_refused(quick_path: Path) -> None:
    async with stores(quick_path) as (full, empty):
        data = await exported(full, quick_path / "file")
        lengths = [*range(0, 60), 100, 500, len(data) // 2, *range(len(data) - 40, len(data))]
        for length in lengths:
            assert await refusal(empty, data[:length], quick_path / "bad")
        assert "its head speaks of" in await refusal(empty, data + b"\0", quick_path / "bad")


async def test_swapped_pages_are_found(tmp_path: Path) -> None:
    """Two pages of one size, each with its own right checksum, in each other's place."""
    async with stores(tmp_path) as (full, empty):
        refs = [PageRef(PageKind.MAIN, bytes([n]) * 32, None, 256) for n in (1, 2)]
        manifest = Manifest(KEY, IDENTITY, range(2), refs)
        assert await full.put_conversation(manifest, lambda ref: ref.key) is PutOutcome.STORED
        data = await exported(full, tmp_path / "file")
        size, start = 8 + 32 + 16, len(data) - len(END) - 2 * (8 + 32 + 16)
        one, two = data[start : start + size], data[start + size : start + 2 * size]
        assert "page 0 does not read" in await refusal(empty, data[:start] + two + one + END, tmp_path / "bad")


def file_of(key: bytes, record: bytes, pages: list[bytes], *, names: list[bytes], says: int | None = None) -> bytes:
    """A file that checks, whatever it holds."""
    total = sum(map(len, pages)) if says is None else says
    head = struct.pack("<16sIHHIIQ", MAGIC, 1, len(key), 0, len(record), len(names), total) + key + record
    body = b"".join(
        (size := struct.pack("<Q", len(page))) + page + Sum(name + size + page).digest()
        for name, page in zip(names, pages, strict=False)
    )
    return head + Sum(head).digest() + body + END


async def test_files_that_check_and_lie(tmp_path: Path) -> None:
    """Every checksum is right, as one who means harm would see to."""
    async with stores(tmp_path) as (_, empty):
        manifest = MADE.manifest(KEY, range(4))
        names = [ref.name for ref in manifest.pages]
        pages = [MADE.data(ref) for ref in manifest.pages]
        record = manifest_record(manifest)
        good = file_of(KEY, record, pages, names=names)
        path = tmp_path / "bad"
        payload = record[8:-8]
        no_cost = payload[:14] + b"\xff" * 8 + payload[22:]
        for bad, words in {
            file_of(b"other key", record, pages, names=names): "record checksum",
            file_of(KEY, seal(2, KEY, payload), pages, names=names): "record kind",
            file_of(KEY, seal(KIND_MANIFEST, KEY, payload[:-1]), pages, names=names): "manifest length",
            file_of(KEY, seal(KIND_MANIFEST, KEY, no_cost), pages, names=names): "cost",
            file_of(KEY, record, pages[:1], names=names, says=sum(map(len, pages))): "bytes, its head speaks",
            file_of(
                KEY, record, pages, names=[*names, names[0]], says=sum(map(len, pages)) - 24
            ): "3 pages, the manifest",
            file_of(KEY, record, pages, names=names, says=2**64 - 1): "head speaks of",
            good.replace(MAGIC, MAGIC[:-1] + b"\0"): "not an exported conversation",
            good[:16] + struct.pack("<I", 2) + good[20:]: "format version 2",
            b"PK\3\4" + good[4:]: "not an exported conversation",
        }.items():
            text = await refusal(empty, bad, path)
            assert words in text, (words, text)
        assert await imported(empty, good, path) is PutOutcome.STORED


async def test_a_page_that_says_it_is_huge(tmp_path: Path) -> None:
    async with stores(tmp_path) as (full, empty):
        data = await exported(full, tmp_path / "file")
        first = len(data) - len(END) - sum(24 + MADE.size(ref) for ref in MADE.refs(range(11)))
        bad = data[:first] + struct.pack("<Q", 1 << 62) + data[first + 8 :]
        assert "page 0 says it has" in await refusal(empty, bad, tmp_path / "bad")


async def test_what_the_store_cannot_hold_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with stores(tmp_path) as (full, _):
        await exported(full, tmp_path / "file")
        with (tmp_path / "file").open("rb") as file, pytest.raises(PortableError, match="the store may hold 100"):
            await examine(file.fileno(), 100)


async def test_a_file_that_changes_after_it_was_checked(tmp_path: Path) -> None:
    async with stores(tmp_path) as (full, empty):
        await exported(full, tmp_path / "file")
        with (tmp_path / "file").open("r+b") as file:
            found = await examine(file.fileno(), MOST)
            start, size = found.places[-1]
            file.seek(start + size - 1)
            file.write(b"\xaa\xbb")
            file.flush()
            with pytest.raises(PortableError, match="does not read as it was written"):
                await take_in(empty, found)
            file.truncate(start + 1)
            with pytest.raises(PortableError, match="the file ends at byte"):
                await take_in(empty, found)
        assert await empty.list() == [] and (await empty.stats()).pages == 0
        await whole(empty)


async def test_another_identity_does_not_replace_ours(tmp_path: Path) -> None:
    async with stores(tmp_path) as (full, empty):
        data = await exported(full, tmp_path / "file")
        other = replace(MADE.manifest(KEY, range(4)), identity=OTHER_IDENTITY)
        assert await empty.put_conversation(other, MADE.data) is PutOutcome.STORED
        with pytest.raises(PortableError, match=f"under the identity {OTHER_IDENTITY}"):
            await imported(empty, data, tmp_path / "again")
        kept = await empty.show(KEY)
        assert kept is not None and kept.manifest == other


async def test_a_store_that_cannot_write_says_so(tmp_path: Path) -> None:
    async with stores(tmp_path) as (full, empty):
        data = await exported(full, tmp_path / "file")
        for path in (tmp_path / "to").iterdir():
            path.unlink()
        assert await imported(empty, data, tmp_path / "again") is PutOutcome.DEGRADED
