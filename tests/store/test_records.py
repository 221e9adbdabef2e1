"""The bytes on disk: as documented, the same for ever, and every change of them found out."""

from __future__ import annotations

import contextlib
import os
import re
from array import array
from itertools import pairwise
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stratastore import Manifest, PageKind, PageRef, records, structure
from stratastore.medium import DATABASES
from stratastore.records import Damaged, NewerFormat, PageRecord, Usage
from stratastore.worth import settle, use, weight, worth

FORMAT = (Path(__file__).parents[2] / "store/FORMAT.md").read_text()
REFS = [
    PageRef(PageKind.MAIN, b"m" * 32, None, 256),
    PageRef(PageKind.DRAFTER, b"m" * 32, b"m" * 32, 256),
    PageRef(PageKind.CHECKPOINT, b"c" * 32, b"m" * 32, 300),
    PageRef(PageKind.TAIL, b"t" * 32, b"m" * 32, 303),
]
MANIFEST = Manifest(b"key", "abcd", [1, 2, 0xFFFFFFFF], REFS, 1.5, b"extra")
PAGE = PageRecord(7, b"p" * 32, 3, 600_000, 262_128, array("Q", [1, 2, 2**64 - 1]))
USAGE = Usage("abcd", 3, 4, 5, 6.5, 7.25, 8.125, 9.0, 10, True)

GOLDEN = {
    "format": (
        records.format_record(b"format"),
        "010001001d0000000100000073747261746120636f6e766572736174696f6e2073746f7265",
    ),
    "usage": (
        records.usage_record(b"key", USAGE),
        "030001003b0000000000000000001d4000000000004020400000000000002240"
        "0a00000001030000000400000005000000000000000000000000001a40040061626364",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_stay_as_they_are(name: str) -> None:
    record, expected = GOLDEN[name]
    assert record[:-8].hex() == expected


def test_checksums_stay_as_they_are() -> None:
    assert records.checksum(b"") == 0x2D06800538D394C2
    assert records.checksum(b"strata") == 0x4B61A1897BFC215F
    assert records.format_record(b"format")[-8:] == records.checksum(
        b"format" + records.format_record(b"format")[:-8]
    ).to_bytes(8, "little")


def test_records_come_back() -> None:
    assert records.read_manifest(b"key", records.manifest_record(MANIFEST)) == MANIFEST
    assert records.read_page(b"name", records.page_record(b"name", PAGE)) == PAGE
    assert records.read_usage(b"key", records.usage_record(b"key", USAGE)) == USAGE
    assert records.read_format(b"format", records.format_record(b"format")) == 1
    with pytest.raises(NewerFormat, match="format 2"):
        records.read_format(b"format", records.format_record(b"format", 2))


READERS = {
    "manifest": (records.manifest_record(MANIFEST), lambda data: records.read_manifest(b"key", data)),
    "page": (records.page_record(b"key", PAGE), lambda data: records.read_page(b"key", data)),
    "usage": (records.usage_record(b"key", USAGE), lambda data: records.read_usage(b"key", data)),
    "format": (records.format_record(b"key"), lambda data: records.read_format(b"key", data)),
}


@pytest.mark.parametrize("name", READERS)
def test_every_flipped_bit_and_every_cut_is_found(name: str) -> None:
    record, read = READERS[name]
    read(record)
    for bit in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            read(bytes(damaged))
    for length in range(len(record)):
        with pytest.raises(Damaged):
            read(record[:length])
    other = next(data for kind, (data, _) in READERS.items() if kind != name)
    for wrong in (other, record + b"\0", b""):
        with pytest.raises(Damaged):
            read(wrong)


@pytest.mark.parametrize("kind", [records.KIND_PAGE, records.KIND_USAGE, records.KIND_MANIFEST])
@given(payload=st.binary(max_size=200))
def test_a_sealed_record_of_any_payload_is_read_or_refused(kind: int, payload: bytes) -> None:
    record = records.seal(kind, b"key", payload)
    read = {2: records.read_page, 3: records.read_usage, 4: records.read_manifest}[kind]
    with contextlib.suppress(Damaged):
        read(b"key", record)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.binary(max_size=20), st.floats(0, 1e300))
def test_any_manifest_comes_back(tokens: list[int], extra: bytes, cost: float) -> None:
    manifest = Manifest(b"k", "identity", tokens, REFS, cost, extra)
    assert records.read_manifest(b"k", records.manifest_record(manifest)) == manifest


def test_the_document_has_the_sizes_of_the_code() -> None:
    sizes = {
        "**Page**": records._PAGE.size,
        "**Usage**": records._USAGE.size,
        "**Manifest**": records._MANIFEST.size,
    }
    for title, size in sizes.items():
        section = FORMAT.split(title)[1].split("\n\n")[1]
        rows = [(int(at), int(length)) for at, length in re.findall(r"^\| (\d+) \| (\d+) \|", section, re.M)]
        assert all(at + length == following for (at, length), (following, _) in pairwise(rows)), title
        assert sum(rows[-1]) == size, title
    assert f"{records._REF.size} a page" in FORMAT
    for database in DATABASES:
        assert f"| `{database.decode()}` |" in FORMAT
    for kind in PageKind:
        assert re.search(rf"^\| {kind.name.lower()}: .*\| {kind.value} \|$", FORMAT, re.M)
    seal = records._SEAL.size + records._SUM.size
    for text, size in (
        ("45 bytes", len(records.format_record(b"format"))),
        ("81 bytes + 8 a chunk", records._PAGE.size + seal),
        ("38 bytes + 4 a token", records._MANIFEST.size + seal),
        ("71 bytes + identity", records._USAGE.size + seal),
    ):
        assert text in FORMAT and int(text.split()[0]) == size


def test_worth_follows_use_age_cost_and_size() -> None:
    def usage(**changes: float) -> Usage:
        values = {"tokens": 100, "pages": 1, "bytes": 1000, "cost": 10.0, "created": 0.0, "last_use": 0.0, **changes}
        return Usage("i", **values)  # type: ignore[arg-type]

    assert worth(usage(), 0, 10) == 2 * worth(usage(), 10, 10)
    assert worth(usage(cost=20.0), 0, 10) == 2 * worth(usage(), 0, 10)
    assert worth(usage(bytes=500), 0, 10) == 2 * worth(usage(), 0, 10)
    assert worth(usage(cost=0.0), 0, 10) > worth(usage(cost=0.0, tokens=10), 0, 10) > 0
    assert 0 < worth(usage(bytes=0), 1e12, 1) < 1e-250
    used = usage()
    use(used, 10, 10)
    assert (used.weight, used.hits, used.last_use) == (1.5, 1, 10)
    assert weight(used, 5, 10) == 1.5  # the clock went back
    assert settle(used, 5) and used.last_use == 5 and not settle(used, 6)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from([0, 10, 900, 3000, 20_000, 200_000])), max_size=40))
def test_the_walk_below_lmdb_agrees_with_lmdb(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("walk") / "file"
    with lmdb.open(str(path), subdir=False, max_dbs=2, map_size=1 << 26, sync=False) as environment:
        databases = [environment.open_db(name) for name in (b"one", b"two")]
        for key, size in changes:
            with environment.begin(write=True) as txn:
                txn.put(b"%03d" % (key ^ 1), os.urandom(50), db=databases[1])
                if size:
                    txn.put(b"%03d" % key, bytes(size), db=databases[key % 2])
                    txn.put(b"%03d" % key, bytes(size // 2), db=databases[key % 2])
                else:
                    txn.delete(b"%03d" % key, db=databases[key % 2])
    data = path.read_bytes()
    check(path)
    for length in range(4096, len(data) - 1, max(4096, len(data) // 9)):
        path.write_bytes(data[:length])
        with contextlib.suppress(structure.Unsound, structure.NotLmdb):  # whole if only free pages are gone
            check(path)


def check(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        structure.check(descriptor, structure.all_runs)
    finally:
        os.close(descriptor)
