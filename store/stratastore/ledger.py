"""Who holds what: the rules of references, inside one write transaction.

    references of a page = conversations that hold it + pages that hang on it
    a page with no references is in `pending`, and so is a page while it is being filled; nothing else is
    a hollow page (known, without bytes) has no chunks, unless it is in `pending`

`pending` is what makes a crash harmless: a put writes page after page in commits of bounded size and the manifest last.
Each new page takes its parent's place in `pending`, so the list names the loose ends of what no manifest holds yet, and
a sweep from these ends removes all of it, back to the first page that somebody holds.

A page whose bytes were lost turns hollow instead of going: what hangs on it and who holds it stays true, readers stop
at it, and the next conversation that has its bytes fills it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from stratastore.medium import NEXT_ID_KEY, Txn
from stratastore.records import (
    Damaged,
    PageRecord,
    Usage,
    checksum,
    chunk_key,
    manifest_record,
    page_record,
    read_chunk_key,
    read_manifest,
    read_page,
    read_usage,
    usage_record,
)
from stratastore.types import Manifest, PageRef

Held = Callable[[bytes], bool]


class Absent(Exception):
    """A manifest names a page that is not there. Never leaves the store."""


class Ledger:
    """Changes pages and conversations in one transaction. Page records are written once, by `close`.

    `held(name)` says that a page is needed by someone who does not show in the references: it is kept, in `pending`.
    """

    def __init__(self, txn: Txn, held: Held) -> None:
        self._txn = txn
        self._held = held
        self._records: dict[bytes, PageRecord | None] = {}
        self._changed: set[bytes] = set()
        self.freed_bytes = 0
        self.freed_pages = 0

    def close(self) -> None:
        """Write what has changed; the last call before the transaction ends."""
        for name in sorted(self._changed):
            record = self._records[name]
            if record is not None:
                self._txn.put(b"pages", name, page_record(name, record))
        self._changed.clear()

    # ------------------------------------------------------------------------------------------------------------ pages

    def page(self, name: bytes) -> PageRecord | None:
        """The record of a page, None if the page is unknown. Raises Damaged."""
        if name not in self._records:
            data = self._txn.get(b"pages", name)
            self._records[name] = None if data is None else read_page(name, data)
        return self._records[name]

    def begin_page(self, ref: PageRef) -> PageRecord | None:
        """Make ready to fill a page; None if it has its bytes already. Raises Absent if its parent is unknown."""
        name, record = ref.name, self.page(ref.name)
        if record is not None and not record.hollow:
            return None
        if record is None:
            record = PageRecord(0, ref.parent)
            self._records[name] = record
            if record.parent_name is not None:
                self._add_reference(record.parent_name)
        else:
            self._delete_chunks(record)
        record.id = self._next_id()
        self._changed.add(name)
        self._txn.put(b"pending", name, b"")
        return record

    def write_chunk(self, record: PageRecord, sequence: int, data: memoryview) -> None:
        """One chunk of a page that is being filled."""
        self._txn.put(b"chunks", chunk_key(record.id, sequence), data)

    def end_page(self, name: bytes, page_id: int, size: int, chunk_bytes: int, sums: array[int]) -> bool:
        """Say that a page has its bytes; False if it went away, or was begun anew, since `begin_page`."""
        record = self.page(name)
        if record is None or record.id != page_id:
            return False
        record.size, record.chunk_bytes, record.sums = size, chunk_bytes, sums
        self._changed.add(name)
        if record.references:
            self._txn.delete(b"pending", name)
        return True

    def hollow(self, name: bytes, page_id: int) -> bool:
        """Drop the bytes of a page that does not read as written; False if it is no longer the page that was read."""
        record = self.page(name)
        if record is None or record.id != page_id or record.hollow:
            return False
        self.freed_bytes += record.size
        record.size, record.sums = 0, array("Q")
        self._delete_chunks(record)
        self._changed.add(name)
        return True

    def _next_id(self) -> int:
        data = self._txn.get(b"meta", NEXT_ID_KEY)
        number = int.from_bytes(data, "little") if data else 1
        self._txn.put(b"meta", NEXT_ID_KEY, (number + 1).to_bytes(8, "little"))
        return number

    def _add_reference(self, name: bytes) -> None:
        record = self.page(name)
        if record is None:
            raise Absent(name.hex())
        record.references += 1
        self._changed.add(name)
        if record.references == 1 and not record.hollow:
            self._txn.delete(b"pending", name)

    def _drop_reference(self, name: bytes) -> None:
        record = self.page(name)
        if record is None or record.references < 1:
            raise Damaged(f"page {name.hex()} has a reference too few")
        record.references -= 1
        self._changed.add(name)
        if record.references == 0:
            self._remove_upwards(name)

    def _remove_upwards(self, name: bytes) -> None:
        """Remove a page nobody refers to, then its parent if that was the last that hung on it, and so on."""
        next_name: bytes | None = name
        while next_name is not None:
            name, record = next_name, self.page(next_name)
            if record is None or record.references:
                return
            if self._held(name):
                self._txn.put(b"pending", name, b"")
                return
            self._remove(name, record)
            next_name = record.parent_name
            if next_name is not None:
                parent = self.page(next_name)
                if parent is None or parent.references < 1:
                    raise Damaged(f"page {next_name.hex()} has a reference too few")
                parent.references -= 1
                self._changed.add(next_name)

    def _remove(self, name: bytes, record: PageRecord) -> None:
        self._delete_chunks(record)
        self._txn.delete(b"pages", name)
        self._txn.delete(b"pending", name)
        self._records[name] = None
        self._changed.discard(name)
        self.freed_bytes += record.size
        self.freed_pages += 1

    def _delete_chunks(self, record: PageRecord) -> None:
        """By number where the record knows it: looking for keys would read the values, too."""
        if not record.hollow:
            for sequence in range(len(record.sums)):
                self._txn.delete(b"chunks", chunk_key(record.id, sequence))
            return
        for key in self._txn.keys(b"chunks", chunk_key(record.id, 0)):
            if read_chunk_key(key)[0] != record.id:
                return
            self._txn.delete(b"chunks", key)

    def sweep(self, most_bytes: int) -> bool:
        """Remove what is pending and not held, about `most_bytes` of it; True if there is more to do."""
        for name in list(self._txn.keys(b"pending")):
            if self._held(name):
                continue
            record = self.page(name)
            if record is None:
                self._txn.delete(b"pending", name)
            elif record.references == 0:
                self._remove_upwards(name)
            else:
                if record.hollow:
                    self._delete_chunks(record)
                self._txn.delete(b"pending", name)
            if self.freed_bytes >= most_bytes:
                return True
        return False

    # ---------------------------------------------------------------------------------------------------- conversations

    def manifest(self, key: bytes) -> Manifest | None:
        """Raises Damaged."""
        data = self._txn.get(b"manifests", key)
        return None if data is None else read_manifest(key, data)

    def usage(self, key: bytes) -> Usage | None:
        """Raises Damaged."""
        data = self._txn.get(b"conversations", key)
        return None if data is None else read_usage(key, data)

    def usages(self) -> Iterator[tuple[bytes, Usage]]:
        """All conversations. Raises Damaged."""
        for key, data in self._txn.items(b"conversations"):
            yield key, read_usage(key, data)

    def put_usage(self, key: bytes, usage: Usage) -> None:
        """Replace what changes with use."""
        self._txn.put(b"conversations", key, usage_record(key, usage))

    def put_conversation(self, manifest: Manifest, usage: Usage, instead_of: Iterable[bytes] = ()) -> None:
        """Store a manifest in place of the one of that key and of those of `instead_of`.

        Only references that differ are touched. Raises Absent if a page is unknown or hollow, Damaged.
        """
        replaced = {key: old for key in {manifest.key, *instead_of} if (old := self.manifest(key)) is not None}
        own = replaced.get(manifest.key)
        before = {ref.name for ref in own.pages} if own else set()
        usage.bytes = 0
        for ref in manifest.pages:
            record = self.page(ref.name)
            if record is None or record.hollow:
                raise Absent(ref.name.hex())
            usage.bytes += record.size
            if ref.name not in before:
                self._add_reference(ref.name)
        after = {ref.name for ref in manifest.pages}
        self._txn.put(b"manifests", manifest.key, manifest_record(manifest))
        self.put_usage(manifest.key, usage)
        for ref in reversed(own.pages if own else ()):
            if ref.name not in after:
                self._drop_reference(ref.name)
        for key in replaced:
            if key != manifest.key:
                self.drop_conversation(key)

    def drop_conversation(self, key: bytes) -> bool:
        """Remove a conversation and every page only it held; False if there is none. Raises Damaged."""
        manifest = self.manifest(key)
        self._txn.delete(b"conversations", key)
        self._txn.delete(b"manifests", key)
        if manifest is None:
            return False
        for ref in reversed(manifest.pages):
            self._drop_reference(ref.name)
        return True


def chunk_sums(data: memoryview, chunk_bytes: int) -> array[int]:
    """Checksums of the chunks `data` is cut into; an empty page has one empty chunk."""
    return array("Q", [checksum(data[at : at + chunk_bytes]) for at in range(0, max(len(data), 1), chunk_bytes)])
