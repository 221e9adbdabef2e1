"""Every value the store writes, byte by byte. Little endian; each carries its kind, version, length and checksum.

All records but chunks are sealed:

    offset  size  field
    0       2     record kind (KIND_*)
    2       2     version of that kind
    4       4     length n of the payload
    8       n     payload
    8+n     8     XXH3-64 of the key the record is stored under and of bytes 0 to 8+n

The key is part of the checksum, so a record that ends up under another key is found out. A chunk is bare payload: its
checksum stands in the page record, which makes one page's chunks a hash tree under one seal, and lets LMDB fill whole
file pages from the caller's memory without a copy. XXH3 was chosen by measurement: 12 GB/s beside 2.5 (CRC-32), 0.65
(BLAKE2b) and 13.7 for a plain copy on one core; it guards against rot, not against an attacker, who owns the file.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import xxhash

from stratastore.types import PAGE_KEY_BYTES, TOKEN_TYPECODE, Manifest, PageKind, PageRef

FORMAT_NAME = b"strata conversation store"
FORMAT_VERSION = 1

KIND_FORMAT = 1
KIND_PAGE = 2
KIND_USAGE = 3
KIND_MANIFEST = 4
RECORD_VERSION = 1

_SEAL = struct.Struct("<HHI")
_SUM = struct.Struct("<Q")
_FORMAT = struct.Struct("<I")
_PAGE = struct.Struct("<QQQIIB32s")  # id, references, size, chunk size, chunk count, has parent, parent key
_USAGE = struct.Struct("<dddIBIIQdH")  # created, last use, weight, hits, pinned, tokens, pages, bytes, cost, identity n
_MANIFEST = struct.Struct("<HIIId")  # identity n, tokens n, pages n, extra n, cost
_REF = struct.Struct("<B32sII")  # kind, key, parent (index + 1, 0: none), position
_CHUNK_KEY = struct.Struct(">QI")  # page id, sequence: big endian, so that key order is reading order
_NO_PARENT = bytes(PAGE_KEY_BYTES)


class Damaged(Exception):
    """A record does not say what was written. Never leaves the store: it becomes a miss and a repair."""


class NewerFormat(Exception):
    """The file says it was written by a later version."""


def checksum(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of `data`."""
    return xxhash.xxh3_64_intdigest(data)


def seal(kind: int, key: bytes, payload: bytes) -> bytes:
    """A sealed record of `payload` for the given key."""
    body = _SEAL.pack(kind, RECORD_VERSION, len(payload)) + payload
    return body + _SUM.pack(checksum(key + body))


def unseal(kind: int, key: bytes, record: bytes) -> bytes:
    """The payload. Raises Damaged for anything else than what `seal` made for this kind and key."""
    if len(record) < _SEAL.size + _SUM.size:
        raise Damaged(f"record of {len(record)} bytes")
    found, version, length = _SEAL.unpack_from(record)
    if length != len(record) - _SEAL.size - _SUM.size:
        raise Damaged(f"record says {length} bytes, has {len(record)}")
    if _SUM.unpack_from(record, len(record) - _SUM.size)[0] != checksum(key + record[: -_SUM.size]):
        raise Damaged("record checksum")
    if (found, version) != (kind, RECORD_VERSION):
        raise Damaged(f"record kind {found}.{version}, expected {kind}.{RECORD_VERSION}")
    return record[_SEAL.size : -_SUM.size]


# ------------------------------------------------------------------------------------------------------------- format


def format_record(key: bytes, version: int = FORMAT_VERSION) -> bytes:
    """The record that marks a file as this store's."""
    return seal(KIND_FORMAT, key, _FORMAT.pack(version) + FORMAT_NAME)


def read_format(key: bytes, record: bytes) -> int:
    """The version a file was written in. Raises Damaged if it is no store, NewerFormat if it is too new to read."""
    payload = unseal(KIND_FORMAT, key, record)
    if payload[_FORMAT.size :] != FORMAT_NAME:
        raise Damaged("format name")
    version = int(_FORMAT.unpack_from(payload)[0])
    if version > FORMAT_VERSION:
        raise NewerFormat(f"format {version}, this version reads {FORMAT_VERSION}")
    return version


# --------------------------------------------------------------------------------------------------------------- page


@dataclass(slots=True)
class PageRecord:
    """One stored page. `sums` empty and `size` 0: hollow, its bytes are not there (yet, or no more)."""

    id: int
    parent: bytes | None
    references: int = 0
    size: int = 0
    chunk_bytes: int = 0
    sums: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def hollow(self) -> bool:
        """The page is known and has no bytes."""
        return not self.sums

    @property
    def parent_name(self) -> bytes | None:
        """Name of the main page it hangs on."""
        return None if self.parent is None else bytes((PageKind.MAIN,)) + self.parent

    def chunk_length(self, sequence: int) -> int:
        """Bytes of the given chunk; all but the last are `chunk_bytes` long."""
        return min(self.chunk_bytes, self.size - sequence * self.chunk_bytes)


def page_record(name: bytes, record: PageRecord) -> bytes:
    """The stored form of a page record."""
    head = _PAGE.pack(
        record.id,
        record.references,
        record.size,
        record.chunk_bytes,
        len(record.sums),
        record.parent is not None,
        record.parent or _NO_PARENT,
    )
    return seal(KIND_PAGE, name, head + _little(record.sums))


def read_page(name: bytes, data: bytes) -> PageRecord:
    """Raises Damaged."""
    payload = unseal(KIND_PAGE, name, data)
    page_id, references, size, chunk_bytes, count, has_parent, parent = _unpack(_PAGE, payload)
    if len(payload) != _PAGE.size + 8 * count:
        raise Damaged("page record length")
    sums = array("Q")
    sums.frombytes(payload[_PAGE.size :])
    if sys.byteorder == "big":
        sums.byteswap()
    return PageRecord(page_id, parent if has_parent else None, references, size, chunk_bytes, sums)


def chunk_key(page_id: int, sequence: int) -> bytes:
    """Key of one chunk of a page."""
    return _CHUNK_KEY.pack(page_id, sequence)


def read_chunk_key(key: bytes) -> tuple[int, int]:
    """Page id and sequence. Raises Damaged."""
    if len(key) != _CHUNK_KEY.size:
        raise Damaged("chunk key")
    page_id, sequence = _CHUNK_KEY.unpack(key)
    return page_id, sequence


# ------------------------------------------------------------------------------------------------------- conversation


@dataclass(slots=True)
class Usage:
    """The part of a conversation that changes with use: small, so that lists and eviction read little."""

    identity: str
    tokens: int
    pages: int
    bytes: int
    cost: float
    created: float
    last_use: float
    weight: float = 1.0
    hits: int = 0
    pinned: bool = False


def usage_record(key: bytes, usage: Usage) -> bytes:
    """The stored form."""
    identity = usage.identity.encode("ascii")
    head = _USAGE.pack(
        usage.created,
        usage.last_use,
        usage.weight,
        min(usage.hits, 0xFFFFFFFF),
        usage.pinned,
        usage.tokens,
        usage.pages,
        usage.bytes,
        usage.cost,
        len(identity),
    )
    return seal(KIND_USAGE, key, head + identity)


def read_usage(key: bytes, data: bytes) -> Usage:
    """Raises Damaged."""
    payload = unseal(KIND_USAGE, key, data)
    created, last_use, weight, hits, pinned, tokens, pages, size, cost, length = _unpack(_USAGE, payload)
    identity = payload[_USAGE.size :]
    if len(identity) != length:
        raise Damaged("usage record length")
    return Usage(identity.decode("ascii"), tokens, pages, size, cost, created, last_use, weight, hits, bool(pinned))


def manifest_record(manifest: Manifest) -> bytes:
    """The stored form of what does not change with use."""
    identity = manifest.identity.encode("ascii")
    head = _MANIFEST.pack(len(identity), len(manifest.tokens), len(manifest.pages), len(manifest.extra), manifest.cost)
    index = {ref.name: place + 1 for place, ref in enumerate(manifest.pages)}
    refs = b"".join(
        _REF.pack(ref.kind, ref.key, index[ref.parent_name] if ref.parent_name else 0, ref.position)
        for ref in manifest.pages
    )
    return seal(KIND_MANIFEST, manifest.key, head + identity + manifest.token_bytes() + refs + manifest.extra)


def read_manifest(key: bytes, data: bytes) -> Manifest:
    """Raises Damaged."""
    payload = unseal(KIND_MANIFEST, key, data)
    identity_n, tokens_n, pages_n, extra_n, cost = _unpack(_MANIFEST, payload)
    ends = [_MANIFEST.size]
    for size in (identity_n, 4 * tokens_n, _REF.size * pages_n, extra_n):
        ends.append(ends[-1] + size)
    if len(payload) != ends[-1]:
        raise Damaged("manifest length")
    identity, ids, refs, extra = (payload[start:end] for start, end in pairwise(ends))
    tokens = array(TOKEN_TYPECODE)
    tokens.frombytes(ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    try:
        return Manifest(key, identity.decode("ascii"), tokens, _read_refs(refs), cost, extra)
    except (ValueError, IndexError) as error:
        raise Damaged(f"manifest: {error}") from None


def _read_refs(data: bytes) -> list[PageRef]:
    pages: list[PageRef] = []
    for kind, key, parent, position in _REF.iter_unpack(data):
        pages.append(PageRef(PageKind(kind), key, pages[parent - 1].key if parent else None, position))
    return pages


def _unpack(layout: struct.Struct, payload: bytes) -> tuple[Any, ...]:
    if len(payload) < layout.size:
        raise Damaged("record too short")
    return layout.unpack_from(payload)


def _little(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()
