"""The full walk: is everything that is referred to there, and everything that is there referred to?

`faults` only looks. `recount` makes it so again after a record was found damaged: what cannot be read goes, and with it
what hangs on it or needs it; the rest keeps its bytes and gets its references counted anew. Losing a conversation costs
one reading of its prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from stratastore.medium import NEXT_ID_KEY, Txn
from stratastore.records import (
    Damaged,
    PageRecord,
    Usage,
    page_record,
    read_chunk_key,
    read_manifest,
    read_page,
    read_usage,
)
from stratastore.types import Manifest

T = TypeVar("T")


@dataclass
class Books:
    """All records that can be read, and where those are that cannot."""

    pages: dict[bytes, PageRecord] = field(default_factory=dict)
    usages: dict[bytes, Usage] = field(default_factory=dict)
    manifests: dict[bytes, Manifest] = field(default_factory=dict)
    pending: set[bytes] = field(default_factory=set)
    chunks: dict[int, int] = field(default_factory=dict)  # page id: chunks
    bad: list[tuple[bytes, bytes, str]] = field(default_factory=list)  # database, key, what is wrong

    def references(self) -> Counter[bytes]:
        """References every page should have."""
        counts: Counter[bytes] = Counter()
        for manifest in self.manifests.values():
            counts.update(ref.name for ref in manifest.pages)
        for record in self.pages.values():
            if record.parent_name is not None:
                counts[record.parent_name] += 1
        return counts


def read_books(txn: Txn) -> Books:
    """Read every record. Never raises Damaged."""
    books = Books(pending=set(txn.keys(b"pending")))
    _read_database(txn, b"pages", read_page, books.pages, books)
    _read_database(txn, b"conversations", read_usage, books.usages, books)
    _read_database(txn, b"manifests", read_manifest, books.manifests, books)
    for key in txn.keys(b"chunks"):
        try:
            page_id, _ = read_chunk_key(key)
        except Damaged as error:
            books.bad.append((b"chunks", key, str(error)))
            continue
        books.chunks[page_id] = books.chunks.get(page_id, 0) + 1
    return books


def _read_database(
    txn: Txn, database: bytes, read: Callable[[bytes, bytes], T], into: dict[bytes, T], books: Books
) -> None:
    for key, data in txn.items(database):
        try:
            into[key] = read(key, data)
        except Damaged as error:
            books.bad.append((database, key, str(error)))


def faults(books: Books) -> Iterator[str]:
    """Every way in which the records disagree, in words. None: sound."""
    for database, key, text in books.bad:
        yield f"{database.decode()} {key.hex()}: {text}"
    for key in books.usages.keys() ^ books.manifests.keys():
        yield f"conversation {key.hex()} has only half of its records"
    yield from _page_faults(books)
    known = {record.id for record in books.pages.values()}
    if len(known) != len(books.pages):
        yield "two pages have one id"
    for page_id in books.chunks.keys() - known:
        yield f"{books.chunks[page_id]} chunks of page {page_id} belong to nothing"


def _page_faults(books: Books) -> Iterator[str]:
    expected = books.references()
    for name in expected.keys() - books.pages.keys():
        yield f"page {name.hex()} is referred to and missing"
    for name, record in books.pages.items():
        if record.references != expected[name]:
            yield f"page {name.hex()} counts {record.references} references, has {expected[name]}"
        if record.references == 0 and name not in books.pending:
            yield f"page {name.hex()} is held by nothing"
        if record.references and not record.hollow and name in books.pending:
            yield f"page {name.hex()} is held and pending"
        chunks = books.chunks.get(record.id, 0)
        if chunks != len(record.sums) and not (record.hollow and name in books.pending):
            yield f"page {name.hex()} has {chunks} chunks of {len(record.sums)}"
    for name in books.pending - books.pages.keys():
        yield f"page {name.hex()} is pending and missing"


def recount(txn: Txn, held: Callable[[bytes], bool]) -> int:
    """Make the records agree again; returns how many records were dropped. Raises Full, Ruined, Unfit."""
    books = read_books(txn)
    dropped = [(database, key) for database, key, _ in books.bad]
    _drop_twins(books, dropped)
    _drop_unreachable(books, dropped, held)
    for database, key in dropped:
        txn.delete(database, key)
    _delete_surplus(txn, {record.id: len(record.sums) for record in books.pages.values()})
    _write_pages(txn, books)
    highest = max((record.id for record in books.pages.values()), default=0)
    stored = txn.get(b"meta", NEXT_ID_KEY)
    following = max(highest + 1, int.from_bytes(stored[:8], "little") if stored else 1)
    txn.put(b"meta", NEXT_ID_KEY, following.to_bytes(8, "little"))
    return len(dropped)


def _drop_twins(books: Books, dropped: list[tuple[bytes, bytes]]) -> None:
    """Of two pages with one id only one can own the chunks, and nothing says which: both go."""
    counts = Counter(record.id for record in books.pages.values())
    for name in [name for name, record in books.pages.items() if counts[record.id] > 1]:
        del books.pages[name]
        dropped.append((b"pages", name))


def _drop_unreachable(books: Books, dropped: list[tuple[bytes, bytes]], held: Callable[[bytes], bool]) -> None:
    """Take away what lacks something it needs, then pages that nothing needs."""
    _drop_orphans_of_parents(books, dropped)
    for key in list(books.manifests.keys() | books.usages.keys()):
        manifest = books.manifests.get(key)
        if key in books.usages and manifest and all(ref.name in books.pages for ref in manifest.pages):
            continue
        for database, table in ((b"manifests", books.manifests), (b"conversations", books.usages)):
            if table.pop(key, None) is not None:
                dropped.append((database, key))
    needed = {ref.name for manifest in books.manifests.values() for ref in manifest.pages}
    queue = [name for name in books.pages if name in needed or held(name)]
    needed = set(queue)
    while queue:
        parent = books.pages[queue.pop()].parent_name
        if parent is not None and parent not in needed:
            needed.add(parent)
            queue.append(parent)
    for name in books.pages.keys() - needed:
        del books.pages[name]
        dropped.append((b"pages", name))


def _drop_orphans_of_parents(books: Books, dropped: list[tuple[bytes, bytes]]) -> None:
    while lost := [
        name
        for name, record in books.pages.items()
        if record.parent_name is not None and record.parent_name not in books.pages
    ]:
        for name in lost:
            del books.pages[name]
            dropped.append((b"pages", name))


def _delete_surplus(txn: Txn, wanted: dict[int, int]) -> None:
    """Chunks that no page record speaks of."""
    for key in txn.keys(b"chunks"):
        try:
            page_id, sequence = read_chunk_key(key)
        except Damaged:
            page_id, sequence = 0, 0
        if sequence >= wanted.get(page_id, 0):
            txn.delete(b"chunks", key)


def _write_pages(txn: Txn, books: Books) -> None:
    expected = books.references()
    for key in list(txn.keys(b"pending")):
        txn.delete(b"pending", key)
    for name, record in books.pages.items():
        if expected[name] == 0:
            txn.put(b"pending", name, b"")
        if record.references != expected[name]:
            record.references = expected[name]
            txn.put(b"pages", name, page_record(name, record))
