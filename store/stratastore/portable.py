"""One conversation as one file, for a backup or another machine: FORMAT.md has the layout.

Files come as descriptors: whoever asks opens them, with its own rights, and this side never opens a path. A file that
is taken in is read twice: once to check all of it before the store is touched, and once for the pages that are
missing, which are checked again, since whoever owns the file may change it in between.

The checksums find what went wrong on the way. They do not say who made a file: its bytes are taken on trust.
"""

from __future__ import annotations

import asyncio
import os
import select
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from stratastore.records import Damaged, manifest_record, read_manifest
from stratastore.store import Store
from stratastore.types import (
    CONVERSATION_KEY_MOST,
    EXTRA_MOST,
    IDENTITY_MOST,
    PAGES_MOST,
    TOKENS_MOST,
    Manifest,
    PageRef,
    PutOutcome,
)

MAGIC = b"STRATA-IMAGE\r\n\x1a\n"  # a transfer as text, which would change line ends, shows at once
END = b"STRATA-IMAGE-END"
VERSION = 1
PAGE_MOST = 1 << 30  # bytes of one page, which is held in memory as a whole
MANIFEST_MOST = 1024 + IDENTITY_MOST + 4 * TOKENS_MOST + 41 * PAGES_MOST + EXTRA_MOST
_HEAD = struct.Struct("<16sIHHIIQ")  # magic, version, key n, 0, manifest n, pages n, bytes of pages
_SIZE = struct.Struct("<Q")
_SUM_BYTES = 16
_PIECE = 4 << 20
_PATIENCE_MS = 30_000  # for the reader of a pipe

Progress = Callable[[int, int], None]
Sum = xxhash.xxh3_128


class PortableError(Exception):
    """The file, or the conversation, will not do; the text says why. The store is as it was."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds. `file_bytes` is its length."""

    key: bytes
    identity: str
    tokens: int
    pages: int
    file_bytes: int


def no_progress(_done: int, _total: int) -> None:
    """Nobody looks."""


class _Descriptor:
    """A descriptor of our own for the same open file. It goes with the last who uses it, a thread perhaps."""

    def __init__(self, number: int) -> None:
        self.number = -1
        self.number = os.dup(number)
        self.kind = stat.S_IFMT(os.fstat(self.number).st_mode)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


# ------------------------------------------------------------------------------------------------------------- writing


class _Sink:
    """Where a file is written to: a regular file or a pipe. Its methods block and run in a thread."""

    def __init__(self, descriptor: _Descriptor) -> None:
        self._descriptor = descriptor
        self._pipe = descriptor.kind == stat.S_IFIFO
        if not self._pipe and descriptor.kind != stat.S_IFREG:
            raise PortableError("it can be written to a regular file or a pipe only")
        if self._pipe:
            os.set_blocking(descriptor.number, False)

    def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """All of it. Raises PortableError."""
        try:
            for part in parts:
                self._write(memoryview(part).cast("B"))
        except OSError as error:
            raise PortableError(f"the file cannot be written: {error.strerror}") from None

    def _write(self, data: memoryview) -> None:
        poll = select.poll()
        poll.register(self._descriptor.number, select.POLLOUT)
        while data:
            if self._pipe and not poll.poll(_PATIENCE_MS):
                raise PortableError(f"nobody has read from the pipe for {_PATIENCE_MS // 1000} seconds")
            try:
                data = data[os.write(self._descriptor.number, data[:_PIECE]) :]
            except BlockingIOError:
                continue


async def export(store: Store, key: bytes, descriptor: int, progress: Progress = no_progress) -> Contents | None:
    """Write a conversation to an open file; None if there is none of that key. Raises PortableError, OSError."""
    sink = _Sink(_Descriptor(descriptor))
    with store.hold(conversations=[key]):
        found = await store.show(key)
        if found is None:
            return None
        lost = found.present.count(False)
        if lost:
            raise PortableError(f"{lost} of its {len(found.present)} pages are lost; it cannot be exported")
        with store.hold(pages=found.manifest.pages):
            size = await _write_all(store, found.manifest, found.conversation.bytes, sink, progress)
    return Contents(key, found.manifest.identity, len(found.manifest.tokens), len(found.present), size)


async def _write_all(store: Store, manifest: Manifest, page_bytes: int, sink: _Sink, progress: Progress) -> int:
    record = manifest_record(manifest)
    head = _HEAD.pack(MAGIC, VERSION, len(manifest.key), 0, len(record), len(manifest.pages), page_bytes)
    head += manifest.key + record
    head += Sum(head).digest()
    await asyncio.to_thread(sink.write, head)
    written = 0
    async for ref, data in store.read_pages(manifest.pages):
        if data is None:
            raise PortableError(f"page {ref.name.hex()} cannot be read; the conversation cannot be exported")
        if len(data) > PAGE_MOST:
            raise PortableError(f"page {ref.name.hex()} has {len(data)} bytes: at most {PAGE_MOST} can be exported")
        await asyncio.to_thread(_write_page, sink, ref, data)
        written += len(data)
        progress(written, page_bytes)
    if written != page_bytes:
        raise PortableError(f"the pages have {written} bytes, {page_bytes} were expected; verify the store")
    await asyncio.to_thread(sink.write, END)
    return _file_bytes(len(manifest.key), len(record), len(manifest.pages), page_bytes)


def _write_page(sink: _Sink, ref: PageRef, data: bytearray | memoryview) -> None:
    size = _SIZE.pack(len(data))
    total = Sum(ref.name + size)
    total.update(data)
    sink.write(size, data, total.digest())


def _file_bytes(key: int, record: int, pages: int, page_bytes: int) -> int:
    return _HEAD.size + key + record + _SUM_BYTES + pages * (_SIZE.size + _SUM_BYTES) + page_bytes + len(END)


# ------------------------------------------------------------------------------------------------------------- reading


class Portable:
    """A file that has been looked through. Made by `examine`; `take_in` stores it."""

    def __init__(self, descriptor: _Descriptor, manifest: Manifest, page_bytes: int, first: int, size: int) -> None:
        self.manifest = manifest
        self.page_bytes = page_bytes
        self.contents = Contents(manifest.key, manifest.identity, len(manifest.tokens), len(manifest.pages), size)
        self.places: list[tuple[int, int]] = []  # where the bytes of each page lie, and how many they are
        self._descriptor = descriptor
        self._end, self._left = first, page_bytes

    def check_next(self) -> int:
        """Find and check the page behind those that are known; returns its size. Raises PortableError."""
        index, at = len(self.places), self._end
        size = int(_SIZE.unpack(_read(self._descriptor, at, _SIZE.size))[0])
        if size > min(self._left, PAGE_MOST):
            raise PortableError(f"page {index} says it has {size} bytes, more than can be")
        total = Sum(self.manifest.pages[index].name + _SIZE.pack(size))
        start = at + _SIZE.size
        for offset in range(0, size, _PIECE):
            total.update(_read(self._descriptor, start + offset, min(_PIECE, size - offset)))
        self._compare(index, total.digest(), start + size)
        self.places.append((start, size))
        self._left -= size
        self._end = start + size + _SUM_BYTES
        return size

    def _compare(self, index: int, digest: bytes, at: int) -> None:
        if _read(self._descriptor, at, _SUM_BYTES) != digest:
            raise PortableError(f"page {index} does not read as it was written")

    def check_end(self) -> None:
        """After the last page. Raises PortableError."""
        if self._left or _read(self._descriptor, self._end, len(END)) != END:
            raise PortableError("the end of the file is damaged")

    def page(self, index: int) -> bytearray:
        """A page's bytes, checked again. Raises PortableError."""
        start, size = self.places[index]
        data = bytearray(size)
        for offset in range(0, size, _PIECE):
            piece = _read(self._descriptor, start + offset, min(_PIECE, size - offset))
            data[offset : offset + len(piece)] = piece
        total = Sum(self.manifest.pages[index].name + _SIZE.pack(size))
        total.update(data)
        self._compare(index, total.digest(), start + size)
        return data


async def examine(descriptor: int, most_bytes: int, progress: Progress = no_progress) -> Portable:
    """Check a whole file whose pages may have `most_bytes` together. Raises PortableError, OSError."""
    found = await asyncio.to_thread(_read_head, _Descriptor(descriptor), most_bytes)
    done = 0
    for _ in found.manifest.pages:
        done += await asyncio.to_thread(found.check_next)
        progress(done, found.page_bytes)
    await asyncio.to_thread(found.check_end)
    return found


def _read_head(descriptor: _Descriptor, most_bytes: int) -> Portable:
    if descriptor.kind != stat.S_IFREG:
        raise PortableError("it can be read from a regular file only")
    size = os.fstat(descriptor.number).st_size
    start = _read(descriptor, 0, min(_HEAD.size, size))
    if not start or not MAGIC.startswith(start[: len(MAGIC)]):
        raise PortableError("the file is not an exported conversation")
    if len(start) < _HEAD.size:
        raise PortableError(f"the file ends after {size} bytes, within its head")
    _, version, key_n, zero, record_n, pages_n, page_bytes = _HEAD.unpack(start)
    if version != VERSION:
        raise PortableError(f"the file has format version {version}; this version reads {VERSION}")
    if not 1 <= key_n <= CONVERSATION_KEY_MOST or zero or record_n > MANIFEST_MOST or pages_n > PAGES_MOST:
        raise PortableError("the head of the file is damaged")
    expected = _file_bytes(key_n, record_n, pages_n, page_bytes)
    if size != expected:
        raise PortableError(f"the file has {size} bytes, its head speaks of {expected}")
    if page_bytes > most_bytes:
        raise PortableError(f"its pages have {page_bytes} bytes, the store may hold {most_bytes}")
    body = _read(descriptor, _HEAD.size, key_n + record_n + _SUM_BYTES)
    if Sum(start + body[:-_SUM_BYTES]).digest() != body[-_SUM_BYTES:]:
        raise PortableError("the head of the file does not read as it was written")
    manifest = _manifest(body[:key_n], body[key_n:-_SUM_BYTES])
    if len(manifest.pages) != pages_n:
        raise PortableError(f"the head speaks of {pages_n} pages, the manifest of {len(manifest.pages)}")
    return Portable(descriptor, manifest, page_bytes, _HEAD.size + len(body), size)


def _manifest(key: bytes, record: bytes) -> Manifest:
    try:
        return read_manifest(key, record)
    except Damaged as error:
        raise PortableError(f"the manifest in the file will not do: {error}") from None


def _read(descriptor: _Descriptor, at: int, size: int) -> bytes:
    parts, got = [], 0
    while got < size:
        try:
            part = os.pread(descriptor.number, size - got, at + got)
        except OSError as error:
            raise PortableError(f"the file cannot be read: {error.strerror}") from None
        if not part:
            raise PortableError(f"the file ends at byte {at + got}")
        parts.append(part)
        got += len(part)
    return b"".join(parts)


async def take_in(store: Store, found: Portable, progress: Progress = no_progress) -> PutOutcome:
    """Store what was examined, in place of an older state of the same conversation. Raises PortableError."""
    manifest = found.manifest
    there = await store.show(manifest.key)
    if there is not None and there.manifest.identity != manifest.identity:
        raise PortableError(f"the store has this conversation under the identity {there.manifest.identity}")
    present = await store.present(manifest.pages)
    sizes = [size for _, size in found.places]
    incoming = sum(size for size, known in zip(sizes, present, strict=True) if not known)
    done = 0
    async with store.put(manifest, incoming_bytes=incoming) as put:
        for index in put.missing:
            if not await put.write(index, await asyncio.to_thread(found.page, index)):
                break
            done += sizes[index]
            progress(done, incoming)
        return await put.commit()
