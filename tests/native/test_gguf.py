"""The GGUF reader: against the `gguf` package on good files, against the corpus and mutations on bad ones."""

from __future__ import annotations

import hashlib
import os
import random
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from strata_native import ffi, lib
from strata_native.errors import StrataNativeError
from strata_native.gguf import GGUF, Tensor, tensor_types

from tests.native import make_gguf_corpus as corpus

NAMES = {"model_open", "model_format", "model_unsupported", "no_memory"}


@pytest.fixture(scope="module")
def model() -> Path:
    """The embedded model."""
    return Path(__file__).resolve().parents[2] / "native" / "models" / "strata-tiny-moe-Q4_0.gguf"


def failure(function: Callable[[], Any]) -> StrataNativeError:
    with pytest.raises(StrataNativeError) as caught:
        function()
    error = caught.value
    assert error.name in NAMES
    assert error.text and error.text.isprintable()
    return error


# ---- the corpus ----


def test_the_corpus_is_what_its_script_makes() -> None:
    on_disk = {p.stem: p.read_bytes() for p in corpus.CORPUS.glob("*.gguf")}
    assert on_disk == {c.name: c.data for c in corpus.CASES}


@pytest.mark.parametrize("case", corpus.CASES, ids=lambda c: c.name)
def test_corpus_from_memory(case: corpus.Case) -> None:
    if case.error is None:
        with GGUF.from_bytes(case.data) as g:
            assert len(dict(g.metadata)) == len(g.metadata)
            assert len(g.fingerprint()) == 32
    else:
        error = failure(lambda: GGUF.from_bytes(case.data, "some.gguf"))
        assert error.name == case.error
        assert case.text in error.text
        assert error.text.startswith("some.gguf: ")


@pytest.mark.parametrize("case", [c for c in corpus.CASES if c.name != "split_memory"], ids=lambda c: c.name)
def test_corpus_from_a_file(case: corpus.Case) -> None:
    path = corpus.CORPUS / f"{case.name}.gguf"
    if case.error is None:
        with GGUF(path) as g:
            assert g.size == len(case.data)
    else:
        error = failure(lambda: GGUF(path))
        assert error.name == case.error
        assert case.text in error.text
        assert path.name in error.text


# ---- facts against the gguf package ----


def assert_same_facts(ours: GGUF, reader: gguf.GGUFReader) -> None:
    theirs = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(theirs)
    for key, field in theirs.items():
        assert ours.metadata[key] == field.contents(), key
    assert len(ours.tensors) == len(reader.tensors)
    for mine, other in zip(ours.tensors, reader.tensors, strict=True):
        assert mine.name == other.name
        assert mine.type_id == other.tensor_type.value
        assert mine.type_name == other.tensor_type.name
        assert list(mine.shape) == other.shape.tolist()
        assert mine.nbytes == other.n_bytes
        assert mine.offset == other.data_offset
        assert ours.tensor(mine.name) is mine


def test_the_embedded_model_against_the_gguf_package(model: Path) -> None:
    reader = gguf.GGUFReader(model)
    with GGUF(model) as g:
        assert (g.version, g.n_shards, g.size) == (3, 1, model.stat().st_size)
        assert g.metadata["general.architecture"] == "qwen35moe"
        assert_same_facts(g, reader)
        for mine, other in list(zip(g.tensors, reader.tensors, strict=True))[::17]:
            assert g.read(mine) == other.data.tobytes()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file by GGUFWriter with every value type, arrays of each, and tensors of several types and shapes."""
    path = tmp_path / "written.gguf"
    w = gguf.GGUFWriter(path, "qwen35moe")
    for kind, value in [
        ("uint8", 255), ("int8", -128), ("uint16", 65535), ("int16", -32768), ("uint32", 2**32 - 1),
        ("int32", -(2**31)), ("uint64", 2**64 - 1), ("int64", -(2**63)), ("float32", 0.1), ("float64", 1e300),
        ("bool", True), ("string", "größe\n\0模型"),
    ]:  # fmt: skip
        getattr(w, f"add_{kind}")(f"v.{kind}", value)
    w.add_string("empty", "")
    w.add_array("a.int", [1, -2, 3])
    w.add_array("a.float", [0.5, -1.25])
    w.add_array("a.bool", [True, False, True])
    w.add_array("a.text", [f"t{i} " * (i % 5) for i in range(1000)])
    rng = np.random.default_rng(1)
    w.add_tensor("f32", rng.normal(size=(3, 5)).astype(np.float32))
    w.add_tensor("f16", rng.normal(size=(7,)).astype(np.float16))
    w.add_tensor("i32", np.arange(6, dtype=np.int32).reshape(1, 2, 3))
    w.add_tensor("f64", np.ones((1, 1, 1, 2)))
    x = rng.normal(size=(4, 3, 256)).astype(np.float32)
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.TQ2_0):
        w.add_tensor(kind.name, gguf.quantize(x, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def test_a_written_file_against_the_gguf_package(written: Path) -> None:
    reader = gguf.GGUFReader(written)
    with GGUF(written) as g:
        assert_same_facts(g, reader)
        for mine, other in zip(g.tensors, reader.tensors, strict=True):
            assert g.read(mine) == other.data.tobytes()
        assert g.metadata["v.string"] == "größe\n\0模型"
        assert g.metadata["v.uint64"] == 2**64 - 1
        assert g.metadata["v.bool"] is True


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_other_alignments(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "aligned.gguf"
    w = gguf.GGUFWriter(path, "x")
    w.add_custom_alignment(alignment)
    for i in range(3):
        w.add_tensor(f"t{i}", np.full(5 + i, i, dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with GGUF(path) as g:
        assert_same_facts(g, gguf.GGUFReader(path))
        assert all(t.offset % alignment == 0 for t in g.tensors)


def test_the_type_table_against_the_gguf_package() -> None:
    ours = {t.id: t for t in tensor_types()}
    assert list(ours) == sorted(ours)
    known = {t.value: (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    for id_, t in ours.items():
        if id_ in known:
            assert (t.name, t.block_size, t.block_bytes) == known[id_]
    assert set(known) - set(ours) == {9, 15}  # Q8_1 and Q8_K never stand in files
    q2_0 = ours[42]  # newer than the package
    assert (q2_0.name, q2_0.block_size, q2_0.block_bytes) == ("Q2_0", 64, 18)
    assert lib.st_ggml_type_find(4) == ffi.NULL
    assert lib.st_ggml_type_at(len(ours)) == ffi.NULL and lib.st_ggml_type_at(-1) == ffi.NULL


# ---- getters ----


def get(g: GGUF, kind: str, key: str) -> Any:
    """What a typed getter gives: the value, None when absent, or the error."""
    out = ffi.new({"u64": "uint64_t *", "i64": "int64_t *", "f64": "double *", "bool": "int *"}[kind])
    err = ffi.new("st_error *")
    rc = getattr(lib, f"st_gguf_get_{kind}")(g.handle, key.encode(), out, err)
    return out[0] if rc == 1 else None if rc == 0 else ffi.string(err.text).decode()


def get_array(g: GGUF, key: str, n: int, kind: str = "i64") -> Any:
    out, err = ffi.new("int64_t[]" if kind == "i64" else "double[]", n), ffi.new("st_error *")
    rc = getattr(lib, f"st_gguf_get_array_{kind}")(g.handle, key.encode(), out, n, err)
    return list(out) if rc == 1 else None if rc == 0 else ffi.string(err.text).decode()


@pytest.fixture
def values() -> GGUF:
    """A file with one value of each kind."""
    c = corpus
    edges = {c.U8: 255, c.I8: -128, c.U16: 65535, c.I16: -32768, c.U32: 2**32 - 1, c.I32: -(2**31), c.BOOL: True}
    edges |= {c.U64: 2**64 - 1, c.I64: -(2**63)}
    kvs = [c.scalar(f"v.{kind}", kind, value) for kind, value in edges.items()]
    kvs += [c.scalar("f32", c.F32, 0.5), c.scalar("f64", c.F64, 1e300), c.scalar("text", c.STRING, "abc")]
    kvs += [c.scalar("two", c.U8, 2), c.scalar("minus", c.I16, -1), c.scalar("one", c.U64, 1)]
    kvs += [c.array("u32s", c.U32, [4, 5, 6]), c.array("bools", c.BOOL, [True, False, True])]
    kvs += [c.array("big", c.U64, [1, 2**63]), c.array("floats", c.F32, [0.5, 2.0]), c.array("texts", c.STRING, ["a"])]
    return GGUF.from_bytes(c.gguf(kvs), "values.gguf")


def test_integers_of_every_width(values: GGUF) -> None:
    c = corpus
    for kind, value in {c.U8: 255, c.U16: 65535, c.U32: 2**32 - 1, c.U64: 2**64 - 1, c.BOOL: 1}.items():
        assert get(values, "u64", f"v.{kind}") == value
    for kind, value in {c.I8: -128, c.I16: -32768, c.I32: -(2**31), c.I64: -(2**63), c.U32: 2**32 - 1}.items():
        assert get(values, "i64", f"v.{kind}") == value
    assert get(values, "u64", "absent") is None
    assert get(values, "u64", "minus") == "values.gguf: key 'minus' is -1; an integer from 0 to 2^64-1 is needed"
    assert get(values, "i64", "v.10").endswith(
        "'v.10' is 18446744073709551615; an integer from -2^63 to 2^63-1 is needed"
    )
    assert "has the type f32; an integer is needed" in get(values, "u64", "f32")
    assert "has the type string; an integer is needed" in get(values, "i64", "text")
    assert "has the type array of u32; an integer is needed" in get(values, "u64", "u32s")


def test_floats_and_bools(values: GGUF) -> None:
    assert get(values, "f64", "f32") == 0.5
    assert get(values, "f64", "f64") == 1e300
    assert get(values, "f64", "minus") == -1.0
    assert "a number is needed" in get(values, "f64", "text")
    assert get(values, "bool", "v.7") == 1
    assert get(values, "bool", "one") == 1
    assert "is 2; true or false is needed" in get(values, "bool", "two")
    assert get(values, "bool", "absent") is None


def test_arrays_and_scalars_for_layers(values: GGUF) -> None:
    assert get_array(values, "u32s", 3) == [4, 5, 6]
    assert get_array(values, "u32s", 2) == [4, 5]
    assert get_array(values, "two", 4) == [2, 2, 2, 2]
    assert get_array(values, "bools", 3) == [1, 0, 1]
    assert get_array(values, "absent", 3) is None
    assert "is an array of 3; at least 4 elements" in get_array(values, "u32s", 4)
    assert "'big' (element 1) is 9223372036854775808" in get_array(values, "big", 2)
    assert "array of f32; an integer or an array of integers is needed" in get_array(values, "floats", 2)
    assert get_array(values, "floats", 2, "f64") == [0.5, 2.0]
    assert get_array(values, "u32s", 3, "f64") == [4.0, 5.0, 6.0]
    assert "a number or an array" in get_array(values, "texts", 1, "f64")


def test_strings(values: GGUF) -> None:
    out, err = ffi.new("st_gguf_str *"), ffi.new("st_error *")
    assert lib.st_gguf_get_str(values.handle, b"text", out, err) == 1
    assert ffi.buffer(out.ptr, out.len)[:] == b"abc"
    assert lib.st_gguf_get_str(values.handle, b"absent", out, err) == 0
    assert lib.st_gguf_get_str(values.handle, b"texts", out, err) == -1
    assert b"array of string; a string is needed" in ffi.string(err.text)
    assert lib.st_gguf_kv_find(values.handle, b"absent") == ffi.NULL
    assert lib.st_gguf_kv_at(values.handle, 10**6) == ffi.NULL


def test_strings_of_an_array_by_index() -> None:
    words = ["x" * (i * 7 % 23) for i in range(1000)]
    with GGUF.from_bytes(corpus.gguf([corpus.array("w", corpus.STRING, list(words))])) as g:
        kv, out = lib.st_gguf_kv_find(g.handle, b"w"), ffi.new("st_gguf_str *")
        for i in [*range(100), *random.Random(3).sample(range(1000), 200), 999]:
            assert lib.st_gguf_kv_str(kv, i, out) == 0
            assert ffi.buffer(out.ptr, out.len)[:].decode() == words[i]
        assert lib.st_gguf_kv_str(kv, 1000, out) == -1


# ---- the Python class ----


def test_metadata_is_a_mapping(values: GGUF) -> None:
    assert "text" in values.metadata and "absent" not in values.metadata
    assert values.metadata.get("absent", 5) == 5
    with pytest.raises(KeyError):
        values.metadata["absent"]
    assert dict(values.metadata)["u32s"] == [4, 5, 6]
    assert values.metadata["bools"] == [True, False, True]
    assert len(values.metadata) == len(list(values.metadata))
    assert values.metadata["u32s"] is values.metadata["u32s"]
    assert values.metadata.raw_strings("text") == [b"abc"]
    with pytest.raises(TypeError):
        values.metadata.raw_strings("two")


def test_strings_that_are_no_utf8() -> None:
    with GGUF.from_bytes(corpus.gguf([corpus.scalar("k", corpus.STRING, b"a\xffb")])) as g:
        assert g.metadata["k"] == "a�b"
        assert g.metadata.raw_strings("k") == [b"a\xffb"]


def test_after_closing(values: GGUF) -> None:
    assert values.metadata["two"] == 2
    values.close()
    values.close()
    assert values.metadata["two"] == 2
    for use in (lambda: values.metadata["text"], values.fingerprint, lambda: values.handle):
        assert "closed" in failure(use).text


def test_reading_parts_of_a_tensor(written: Path) -> None:
    with GGUF(written) as g:
        t = g.tensor("f32")
        assert g.read(t, 4, 8) == g.read(t)[4:12]
        assert g.read(t, t.nbytes) == b""
        for start, size in [(-1, 2), (0, t.nbytes + 1), (t.nbytes, 1), (8, -1)]:
            with pytest.raises(ValueError, match="are not inside"):
                g.read(t, start, size)
        with pytest.raises(KeyError):
            g.tensor("absent")


def test_a_large_vocabulary_decodes_quickly() -> None:
    words = [f"Ġtoken{i}" for i in range(250_000)]
    body = b"".join(corpus.string(w) for w in words)
    head = corpus.string("w") + corpus.u32(corpus.ARRAY) + corpus.u32(corpus.STRING) + corpus.u64(len(words))
    data = corpus.gguf([head + body])
    times = []
    for _ in range(3):
        with GGUF.from_bytes(data) as g:
            start = time.thread_time()
            assert g.metadata["w"] == words
            times.append(time.thread_time() - start)
    assert min(times) < 0.3  # seconds of processor time: what else runs does not count


# ---- files that cannot be opened ----


def test_what_is_no_file(tmp_path: Path) -> None:
    error = failure(lambda: GGUF(tmp_path / "absent.gguf"))
    assert error.name == "model_open" and error.text.endswith("absent.gguf: No such file or directory")
    error = failure(lambda: GGUF(tmp_path))
    assert error.name == "model_open" and "is a directory; name the .gguf file" in error.text
    os.mkfifo(tmp_path / "fifo")
    error = failure(lambda: GGUF(tmp_path / "fifo"))
    assert error.name == "model_open" and "not a regular file" in error.text


def test_a_strange_path_stays_on_one_line(tmp_path: Path) -> None:
    assert "\\nREADY" in failure(lambda: GGUF(tmp_path / "a\nREADY b")).text
    assert failure(lambda: GGUF(tmp_path / ("d" * 200) / ("x" * 200))).text.endswith("x: No such file or directory")
    assert failure(lambda: GGUF("y" * 5000)).text.endswith("File name too long")
    assert failure(lambda: GGUF("")).name == "model_open"


# ---- split models ----


def write_split(folder: Path, stem: str = "m") -> list[Path]:
    """Seven tensors in parts of at most three."""
    w = gguf.GGUFWriter(folder / f"{stem}.gguf", "qwen35moe", split_max_tensors=3)
    w.add_string("some.key", "only in the first part")
    for i in range(7):
        w.add_tensor(f"t{i}", np.full((2, 8 + i), i, dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return sorted(folder.glob(f"{stem}-*.gguf"))


def test_a_split_model_opens_whole(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    assert len(parts) == 3
    with GGUF(parts[0]) as g:
        assert (g.n_shards, g.size) == (3, sum(p.stat().st_size for p in parts))
        assert g.metadata["some.key"] == "only in the first part"
        assert [t.name for t in g.tensors] == [f"t{i}" for i in range(7)]
        assert [t.shard for t in g.tensors] == [0, 0, 0, 1, 1, 1, 2]
        for i, t in enumerate(g.tensors):
            assert g.read(t) == np.full((2, 8 + i), i, dtype=np.float32).tobytes()
            assert g.tensor(t.name) is t


def test_split_models_that_are_not_whole(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    error = failure(lambda: GGUF(parts[1]))
    assert error.name == "model_format" and "this is part 2 of 3" in error.text and "-00001-of-00003.gguf" in error.text

    renamed = parts[0].rename(tmp_path / "renamed.gguf")
    assert "not called NAME-00001-of-00003.gguf" in failure(lambda: GGUF(renamed)).text
    renamed.rename(parts[0])

    hidden = parts[2].rename(tmp_path / "hidden")
    error = failure(lambda: GGUF(parts[0]))
    assert error.name == "model_open" and "part 3 of 3 is missing: m-00003-of-00003.gguf should" in error.text

    parts[2].write_bytes(parts[1].read_bytes())
    assert "should be part 3 of 3, but split.no 1 and split.count 3" in failure(lambda: GGUF(parts[0])).text

    parts[2].write_bytes(corpus.every_type())
    assert "m-00003-of-00003.gguf: should be part 3 of 3" in failure(lambda: GGUF(parts[0])).text

    parts[2].write_bytes(hidden.read_bytes()[:-17])  # 16 bytes of padding and one of t6
    assert "m-00003-of-00003.gguf: tensor 't6'" in failure(lambda: GGUF(parts[0])).text


def small_part(no: int, count: int, name: str, total: int, kind: int) -> bytes:
    c = corpus
    kvs = [c.scalar("split.no", kind, no), c.scalar("split.count", kind, count)]
    kvs += [c.scalar("split.tensors.count", kind, total)]
    return c.gguf(kvs, [c.tensor(name, [8])], bytes([no + 1] * 32))


@pytest.mark.parametrize("kind", [corpus.U8, corpus.U16, corpus.I32, corpus.U64, corpus.I64])
def test_split_keys_of_any_integer_type(tmp_path: Path, kind: int) -> None:
    for i in range(2):
        (tmp_path / f"a-0000{i + 1}-of-00002.gguf").write_bytes(small_part(i, 2, f"t{i}", 2, kind))
    with GGUF(tmp_path / "a-00001-of-00002.gguf") as g:
        assert [g.read(t)[0] for t in g.tensors] == [1, 2]


def test_split_models_are_checked_across_parts(tmp_path: Path) -> None:
    first, second = tmp_path / "a-00001-of-00002.gguf", tmp_path / "a-00002-of-00002.gguf"
    first.write_bytes(small_part(0, 2, "same", 2, corpus.U16))
    second.write_bytes(small_part(1, 2, "same", 2, corpus.U16))
    assert "00002-of-00002.gguf: the tensor 'same' appears twice" in failure(lambda: GGUF(first)).text
    first.write_bytes(small_part(0, 2, "other", 3, corpus.U16))
    assert "split.tensors.count is 3, but all parts together hold 2" in failure(lambda: GGUF(first)).text


# ---- fingerprint ----


def fingerprint_by_hand(paths: list[Path], tensors: list[Tensor]) -> str:
    """The fingerprint from its description, over plain bytes."""
    files = [p.read_bytes() for p in paths]
    h = hashlib.blake2b(b"strata model fingerprint 1\n", digest_size=16)
    h.update(struct.pack("<QQ", sum(map(len, files)), len(files)))
    for data, path in zip(files, paths, strict=True):
        reader = gguf.GGUFReader(path)
        last = reader.tensors[-1].field
        end = int(last.offset) + sum(int(part.nbytes) for part in last.parts)
        h.update(struct.pack("<QQ", len(data), end) + data[:end])
    for t in tensors:
        pieces = t.shape[2] if len(t.shape) == 3 else 1
        size = t.nbytes // pieces
        for i in range(pieces):
            piece = files[t.shard][t.offset + i * size : t.offset + (i + 1) * size]
            if size <= 12288:
                h.update(piece)
            else:
                middle = (size - 4096) // 2
                h.update(piece[:4096] + piece[middle : middle + 4096] + piece[-4096:])
    return h.hexdigest()


def test_fingerprint_is_what_its_description_says(model: Path, written: Path, tmp_path: Path) -> None:
    for path in (model, written):
        with GGUF(path) as g:
            assert g.fingerprint() == fingerprint_by_hand([path], g.tensors)
    parts = write_split(tmp_path)
    with GGUF(parts[0]) as g:
        assert g.fingerprint() == fingerprint_by_hand(parts, g.tensors)


def test_fingerprint_does_not_depend_on_the_place(tmp_path: Path, written: Path) -> None:
    data = written.read_bytes()
    (tmp_path / "elsewhere").write_bytes(data)
    prints = set()
    for open_it in (lambda: GGUF(written), lambda: GGUF(tmp_path / "elsewhere"), lambda: GGUF.from_bytes(data)):
        with open_it() as g:
            prints.add(g.fingerprint())
    assert len(prints) == 1 and re.fullmatch("[0-9a-f]{32}", prints.pop())


def test_fingerprint_of_another_content_differs() -> None:
    c = corpus

    def fingerprint(key: str = "k", name: str = "t", change: int = -1) -> str:
        data = bytearray(c.gguf([c.scalar(key, c.U32, 1)], [c.tensor(name, [4096, 3, 2])], bytes(98304)))
        if change >= 0:
            data[len(data) - 98304 + change] ^= 1
        with GGUF.from_bytes(bytes(data)) as g:
            return g.fingerprint()

    # two experts of 49152 bytes: start, middle and end of each are sampled
    sampled = [0, 4095, 22528, 26623, 45056, 49151, 49152, 49152 + 22528, 98303]
    prints = [fingerprint(), fingerprint(key="l"), fingerprint(name="u"), *(fingerprint(change=i) for i in sampled)]
    assert len(set(prints)) == len(prints)
    assert fingerprint(change=4096) == fingerprint()


def test_fingerprint_is_quick(model: Path) -> None:
    with GGUF(model) as g:
        times = []
        for _ in range(5):
            start = time.thread_time()
            g.fingerprint()
            times.append(time.thread_time() - start)
    assert min(times) < 0.05  # seconds of processor time


# ---- advice ----


def test_advice(model: Path) -> None:
    err = ffi.new("st_error *")
    with GGUF(model) as g:
        t = g.tensor("token_embd.weight")
        entry, before = lib.st_gguf_tensor_at(g.handle, t.index), g.read(t)
        for advice in (0, 1, 2, 3, 4):  # normal, random, sequential, will need, do not need
            assert lib.st_gguf_advise(g.handle, entry, advice, err) == 0
        assert lib.st_gguf_advise_range(g.handle, entry, 5, t.nbytes - 5, 3, err) == 0
        assert g.read(t) == before
        for start, size in [(0, t.nbytes + 1), (t.nbytes, 1), (2**64 - 1, 2), (1, 2**64 - 1)]:
            assert lib.st_gguf_advise_range(g.handle, entry, start, size, 3, err) == -1
            assert ffi.string(err.name) == b"internal"
        assert lib.st_gguf_advise(g.handle, entry, 9999, err) == -1


def test_advice_does_not_clear_memory() -> None:
    data = corpus.gguf([], [corpus.tensor("t", [8192])], b"\1" * 32768)
    with GGUF.from_bytes(data) as g:
        assert lib.st_gguf_advise(g.handle, lib.st_gguf_tensor_at(g.handle, 0), 4, ffi.new("st_error *")) == 0
        assert g.read(g.tensors[0]) == b"\1" * 32768


# ---- damage ----


def opens_or_fails_by_name(data: bytes) -> bool:
    """True when it opens and everything in it can be read; False on a proper error."""
    try:
        g = GGUF.from_bytes(data)
    except StrataNativeError as error:
        assert error.name in NAMES
        assert error.text.startswith("memory: ") and error.text.isprintable()
        return False
    with g:
        for key in g.metadata:
            g.metadata[key]
        for t in g.tensors:
            assert len(g.read(t)) == t.nbytes
        g.fingerprint()
    return True


def test_every_truncation() -> None:
    data = corpus.every_type()
    assert opens_or_fails_by_name(data)
    assert not any(opens_or_fails_by_name(data[:size]) for size in range(len(data)))


def mutated(rng: random.Random, data: bytes) -> bytes:
    """One to three changes: a byte, an edge value over a field, a cut, a repeated piece."""
    edges = [0, 1, 7, 8, 9, 31, 255, 2**31, 2**32 - 1, 2**32, 2**61, 2**63, 2**64 - 32, 2**64 - 1]
    out = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(out))
        match rng.randrange(5):
            case 0 | 1:
                out[at] ^= 1 << rng.randrange(8)
            case 2:
                out[at : at + 8] = struct.pack("<Q", rng.choice(edges))
            case 3:
                del out[at : at + rng.randrange(1, 9)]
            case _:
                out[at:at] = out[at : at + rng.randrange(1, 33)]
    return bytes(out)


def test_mutations_give_a_named_error_or_a_model() -> None:
    rng = random.Random(20)
    seeds = [corpus.every_type(), *(c.data for c in corpus.CASES if len(c.data) > 60)]
    results = [opens_or_fails_by_name(mutated(rng, rng.choice(seeds))) for _ in range(4000)]
    assert 40 < sum(results) < 3000  # both outcomes are met
