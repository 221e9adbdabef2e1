"""Small hostile GGUF files and a valid one, built byte by byte.

`python tests/native/make_gguf_corpus.py` writes them to `gguf_corpus/` beside this file, where the tests and the fuzzer
(native/fuzz) take them. `CASES` says which error each must give.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "gguf_corpus"

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
HUGE = 2**64 - 1


@dataclass(frozen=True)
class Case:
    """One file: its bytes, the error's name (None: it opens) and a part of the error's text."""

    name: str
    data: bytes
    error: str | None
    text: str = ""


def u32(n: int) -> bytes:
    """A u32 as stored."""
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    """A u64 as stored."""
    return struct.pack("<Q", n)


def string(text: str | bytes, length: int | None = None) -> bytes:
    """A string as stored, with a wrong length if one is given."""
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw) if length is None else length) + raw


def scalar(key: str | bytes, kind: int, value: object) -> bytes:
    """One metadata entry of a scalar."""
    if kind == STRING:
        assert isinstance(value, str | bytes)
        return string(key) + u32(kind) + string(value)
    return string(key) + u32(kind) + struct.pack("<" + CODES[kind], value)


def array(key: str, kind: int, values: list[object], count: int | None = None) -> bytes:
    """One metadata entry of an array, with a wrong count if one is given."""
    body = b"".join(string(str(v)) if kind == STRING else struct.pack("<" + CODES[kind], v) for v in values)
    return string(key) + u32(ARRAY) + u32(kind) + u64(len(values) if count is None else count) + body


def tensor(name: str | bytes, dims: list[int], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    """One entry of the tensor table."""
    return (
        string(name)
        + u32(len(dims) if n_dims is None else n_dims)
        + b"".join(u64(d) for d in dims)
        + u32(kind)
        + u64(offset)
    )


def gguf(
    kvs: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_kv: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file of these parts; `data` starts where the reader looks for it."""
    kvs, tensors = list(kvs), list(tensors)
    head = magic + u32(version)
    head += u64(len(tensors) if n_tensors is None else n_tensors) + u64(len(kvs) if n_kv is None else n_kv)
    head += b"".join(kvs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data if data else head


def every_type(version: int = 3) -> bytes:
    """A valid file with every value type, arrays of each kind, and tensors of one to three dimensions."""
    kvs = [scalar("general.architecture", STRING, "qwen35moe"), scalar("empty", STRING, "")]
    kvs += [scalar(f"v.{kind}", kind, True if kind == BOOL else 7) for kind in CODES]
    kvs += [array(f"a.{kind}", kind, [True, False] if kind == BOOL else [1, 2, 3]) for kind in CODES]
    kvs += [array("a.text", STRING, [f"token {i}" for i in range(70)]), array("a.none", STRING, [])]
    tensors = [
        tensor("token_embd.weight", [32, 3], 8, 0),  # 102 bytes
        tensor("blk.0.ffn_up_exps.weight", [32, 2, 3], 2, 128),  # 108 bytes
        tensor("output_norm.weight", [5], 0, 256),  # 20 bytes
    ]
    return gguf(kvs, tensors, bytes(i % 251 for i in range(276)), version=version)


def _cut(data: bytes, size: int) -> bytes:
    return data[:size]


def _cases() -> list[Case]:
    f32 = tensor("a", [8])
    body = bytes(32)
    damaged, unsupported = "model_format", "model_unsupported"
    one_key = [scalar("k", U32, 1)]
    return [
        # files that open
        Case("valid_v3", every_type(), None),
        Case("valid_v2", every_type(2), None),
        Case("valid_no_tensors", gguf(one_key), None),
        Case("valid_nothing", gguf(), None),
        Case("valid_align_64", gguf([scalar("general.alignment", U16, 64)], [f32], body, alignment=64), None),
        # what is no GGUF file, or another kind of it
        Case("empty", b"", damaged, "the file is empty"),
        Case("two_bytes", b"GG", damaged, "not a GGUF file"),
        Case("text", b"hello, world\n", damaged, "not a GGUF file"),
        Case("lfs_pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", damaged, "Git LFS pointer"),
        Case("web_page", b"<!DOCTYPE html><title>404</title>", damaged, "web page"),
        Case("zip", b"PK\x03\x04\x14\x00", damaged, "zip archive"),
        Case("magic_swapped", b"FUGG" + bytes(20), damaged, "byte-swapped"),
        Case("big_endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0), unsupported, "big-endian"),
        Case("version_0", gguf(version=0), damaged, "version 0"),
        Case("version_1", gguf(version=1), unsupported, "version 1 is too old"),
        Case("version_4", gguf(version=4), unsupported, "version 4 is newer"),
        # cut off
        Case("cut_version", b"GGUF\x03", damaged, "the version needs 4 bytes at byte 4, but the file ends at byte 5"),
        Case("cut_counts", _cut(gguf(), 20), damaged, "the number of keys needs 8 bytes at byte 16"),
        Case("cut_key", _cut(gguf([scalar("key", U64, 1)] * 2), 53), damaged, "key 2 of 2: the key needs 8 bytes"),
        Case("cut_value", _cut(gguf([scalar("key", U64, 1)]), 45), damaged, "key 'key': the value needs 8 bytes"),
        Case("cut_tensor", _cut(gguf([], [tensor("abcdefgh", [8])] * 2), 90), damaged, "a dimension needs 8"),
        Case("cut_offset", _cut(gguf([], [tensor("abcdefgh", [8])]), 60), damaged, "'abcdefgh': the offset needs"),
        Case("cut_data", gguf([], [f32], body[:31]), damaged, "tensor 'a': 32 bytes at offset 0 run past the end"),
        Case("cut_padding", gguf([], [f32]), damaged, "(0 bytes; damaged"),
        # counts
        Case("huge_n_kv", gguf(n_kv=HUGE), damaged, "18446744073709551615 keys, but the file can hold 0"),
        Case("huge_n_tensors", gguf(one_key, n_tensors=2**61), damaged, "2305843009213693952 tensors"),
        Case("n_kv_too_many", gguf(one_key, n_kv=2), damaged, "2 keys, but the file can hold 1"),
        Case("n_kv_too_few", gguf(one_key, [f32], body, n_kv=0), damaged, "tensor 'k': the dim"),
        # strings and keys
        Case("huge_key", gguf([string("k", HUGE) + bytes(16)]), damaged, "the key has a length of 184467440737"),
        Case("long_key", gguf([string("k", 2**16) + bytes(16)]), damaged, "1 to 65535 bytes"),
        Case("past_key", gguf([string("k", 4096) + bytes(16)]), damaged, "the key needs 4096 bytes"),
        Case("empty_key", gguf([scalar("", STRING, "abc")]), damaged, "length of 0"),
        Case("key_with_nul", gguf([scalar("a\0b", U32, 1)]), damaged, "not plain UTF-8"),
        Case("key_not_utf8", gguf([scalar(b"a\xff", U32, 1)]), damaged, "the key 'a\\xff' is not plain UTF-8"),
        Case("key_with_newline", gguf([scalar("a\nERR", U32, 1)]), damaged, "'a\\nERR'"),
        Case("twice", gguf([*one_key, scalar("j", U8, 1), *one_key]), damaged, "'k' appears twice"),
        Case("huge_string", gguf([string("k") + u32(STRING) + u64(HUGE)]), damaged, "key 'k': a string needs 18446"),
        Case("past_string", gguf([string("k") + u32(STRING) + string("abc", 4)]), damaged, "a string needs 4 bytes"),
        # values
        Case("type_13", gguf([string("k") + u32(13) + u64(0)]), damaged, "the type 13 does not exist"),
        Case("type_huge", gguf([string("k") + u32(2**32 - 1) + u64(0)]), damaged, "the type 4294967295"),
        Case("array_type", gguf([array("k", U8, [1])[:13] + u32(99) + u64(1)]), damaged, "the array's type 99"),
        Case("nested", gguf([string("k") + u32(ARRAY) + u32(ARRAY) + u64(0)]), unsupported, "arrays of arrays"),
        Case("huge_array", gguf([array("k", U64, [1, 2], HUGE)]), damaged, "length 18446744073709551615 is more"),
        Case("wrap_array", gguf([array("k", U64, [1, 2], 2**61 + 2)]), damaged, "can hold (2)"),
        Case("past_array", gguf([array("k", U8, [1, 2], 3)]), damaged, "the array's length 3 is more"),
        Case("huge_strings", gguf([array("k", STRING, ["a"] * 4, 2**60)]), damaged, "can hold (4)"),
        Case("past_strings", gguf([array("k", STRING, ["aaaaaaaa"], 2)]), damaged, "the length of a string needs 8"),
        # alignment
        Case("align_0", gguf([scalar("general.alignment", U32, 0)]), damaged, "general.alignment is 0"),
        Case("align_4", gguf([scalar("general.alignment", U32, 4)]), damaged, "general.alignment is 4"),
        Case("align_48", gguf([scalar("general.alignment", U32, 48)]), damaged, "a power of two from 8 to 65536"),
        Case("align_huge", gguf([scalar("general.alignment", U64, 2**63)]), damaged, "9223372036854775808"),
        Case("align_negative", gguf([scalar("general.alignment", I32, -32)]), damaged, "is -32; an integer from 0"),
        Case("align_text", gguf([scalar("general.alignment", STRING, "32")]), damaged, "the type string; an integer"),
        # tensors
        Case("dims_0", gguf([], [tensor("a", [], n_dims=0) + u64(0)], body), damaged, "it has 0 dimensions"),
        Case("dims_5", gguf([], [tensor("a", [1] * 5)], body), damaged, "it has 5 dimensions; 1 to 4"),
        Case("dims_huge", gguf([], [tensor("a", [8], n_dims=2**32 - 1)], body), damaged, "4294967295 dimensions"),
        Case("dim_zero", gguf([], [tensor("a", [8, 0])], body), damaged, "dimension 1 is 0"),
        Case("dim_negative", gguf([], [tensor("a", [HUGE])], body), damaged, "dimension 0 is 18446744073709551615"),
        Case("dim_product", gguf([], [tensor("a", [2**32, 2**31])], body), damaged, "more than 2^63 values"),
        Case("dim_wrap", gguf([], [tensor("a", [2**32, 2**32, 2**32, 2**32])], body), damaged, "more than 2^63 values"),
        Case("bytes_wrap", gguf([], [tensor("a", [2**62], 28)], body), damaged, "more than 2^64 bytes"),
        Case("block", gguf([], [tensor("a", [40], 2)], body), damaged, "is 40; type Q4_0 needs a multiple of 32"),
        Case("block_k", gguf([], [tensor("a", [640], 12)], bytes(512)), damaged, "type Q4_K needs a multiple of 256"),
        Case(
            "type_unknown", gguf([], [tensor("x.y", [8], 99)], body), unsupported, "'x.y': the tensor type with id 99"
        ),
        Case("type_removed", gguf([], [tensor("x.y", [32], 4)], body), unsupported, "id 4"),
        Case("type_negative", gguf([], [tensor("x.y", [8], 2**32 - 1)], body), damaged, "id 4294967295"),
        Case("offset_odd", gguf([], [tensor("a", [8], 0, 8)], bytes(64)), damaged, "the offset 8 is not a multiple of"),
        Case("offset_past", gguf([], [tensor("a", [8], 0, 64)], bytes(64)), damaged, "32 bytes at offset 64 run past"),
        Case("offset_wrap", gguf([], [tensor("a", [8], 0, HUGE - 31)], bytes(64)), damaged, "at offset 184467440737"),
        Case("overlap", gguf([], [tensor("a", [16]), tensor("b", [8], 0, 32)], bytes(64)), damaged, "'a' (F32, 64 by"),
        Case("same_place", gguf([], [f32, tensor("b", [8])], body), damaged, "runs into tensor"),
        Case("same_name", gguf([], [f32, tensor("a", [8], 0, 32)], bytes(64)), damaged, "the tensor 'a' appears twice"),
        Case("name_empty", gguf([], [tensor("", [8, 1])], body), damaged, "the name has a length of 0"),
        Case("name_long", gguf([], [tensor("a" * 256, [8])], body), damaged, "1 to 255 bytes"),
        Case("name_huge", gguf([], [string("a", 2**63) + bytes(40)], body), damaged, "name has a length of 9223372"),
        Case("name_bytes", gguf([], [tensor(b"\x1b[31m", [8])], body), damaged, "'\\x1b[31m' is not plain"),
        # split models
        Case("split_memory", gguf([scalar("split.count", U16, 2)]), unsupported, "cannot be read from memory"),
        Case("split_second", gguf([scalar("split.no", U16, 1), scalar("split.count", U16, 2)]), damaged, "part 2 of 2"),
        Case("split_huge", gguf([scalar("split.count", U64, HUGE)]), damaged, "split.count is 18446744073709551615"),
        Case("split_text", gguf([scalar("split.count", STRING, "2")]), damaged, "'split.count' has the type string"),
    ]


CASES = _cases()


def main() -> None:
    """Write the files; remove what no case names any more."""
    CORPUS.mkdir(exist_ok=True)
    for old in CORPUS.glob("*.gguf"):
        old.unlink()
    for case in CASES:
        assert len(case.data) < 4096, case.name
        (CORPUS / f"{case.name}.gguf").write_bytes(case.data)


if __name__ == "__main__":
    main()
