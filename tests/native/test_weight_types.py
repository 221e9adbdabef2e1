"""Every weight type: what its blocks mean, by the package gguf; its products, bit for bit by the rules and close to
exact arithmetic; packed or out of the file; and whole models of it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from strata_native import ffi, lib

from tests.native import arithmetic as rules
from tests.native import tiny_model
from tests.native.arithmetic import F, Floats
from tests.native.driver import MODEL, Engine, run
from tests.native.quantizers import quantize
from tests.native.test_kernels import ISAS, aligned, floats, halves, ptr, same
from tests.native.tiny_model import Shape

TYPES = [Type(lib.st_weight_type_at(i).id) for i in range(lib.ST_WEIGHT_TYPES)]
SUPER = (Type.Q4_K, Type.Q5_K, Type.Q6_K)
WITH_MIN = (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K)
every_type = pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name.lower())
SEEDS = st.integers(0, 2**32 - 1)
thorough = settings(deadline=None, max_examples=25)


@pytest.fixture(scope="module", params=ISAS)
def table(request: pytest.FixtureRequest) -> Any:
    """One table of kernels; its test is skipped where the processor lacks the instructions."""
    found = lib.st_kernels_find(request.param.encode(), ffi.NULL)
    if found == ffi.NULL:
        pytest.skip(f"this processor has no {request.param}")
    return found


@pytest.fixture(autouse=True)
def _floats_may_overflow() -> Any:
    with np.errstate(all="ignore"):
        yield


def entry(kind: Type) -> Any:
    """The type's row of the table."""
    return lib.st_weight_type_at(lib.st_weight_find(int(kind)))


# ---- blocks: any bytes, with scales of a chosen size ------------------------------------------------------------


def random_rows(rng: np.random.Generator, kind: Type, n: int, blocks: int, sizes: str = "ordinary") -> Any:
    """n rows of a file: random bytes, but scales (and minima) that are numbers."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    rows = rng.integers(0, 256, (n, blocks, block_bytes)).astype(np.uint8)
    scales = halves(rng, (n, blocks, 2), sizes).view(np.uint8).reshape(n, blocks, 4)
    if kind == Type.Q6_K:
        rows[..., 208:] = scales[..., :2]
    else:
        count = 4 if kind in WITH_MIN else 2
        rows[..., :count] = scales[..., :count]
    return np.ascontiguousarray(rows.reshape(n, -1))


def half(rows: Any, at: int) -> Floats:
    return np.ascontiguousarray(rows[..., at : at + 2]).view(np.float16)[..., 0].astype(F)


def nibbles(rows: Any) -> Any:
    return np.concatenate([rows & 15, rows >> 4], axis=-1).astype(np.int32)


NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int32)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Rows taken apart: codes [n][k]; d, m [n][blocks]; of super-blocks also sc [n][k / 16] and mn [n][k / 32]."""

    codes: Any
    d: Floats
    m: Floats | None = None
    sc: Any = None
    mn: Any = None


def take_apart(kind: Type, rows: Any) -> Blocks:
    """The layouts written a second time (the first is arith.h); `test_blocks_mean_what_gguf_says` holds it to gguf."""
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    b = rows.reshape(len(rows), -1, block_bytes)
    n = len(rows)
    m: Floats | None = None
    if kind == Type.Q8_0:
        codes = np.ascontiguousarray(b[..., 2:]).view(np.int8).astype(np.int32)
    elif kind == Type.Q4_0:
        codes = nibbles(b[..., 2:]) - 8
    elif kind == Type.Q4_1:
        codes, m = nibbles(b[..., 4:]), half(b, 2)
    elif kind == Type.IQ4_NL:
        codes = NL[nibbles(b[..., 2:])]
    elif kind in (Type.Q5_0, Type.Q5_1):
        at = 2 if kind == Type.Q5_0 else 4
        high = np.unpackbits(b[..., at : at + 4], axis=-1, bitorder="little").astype(np.int32)
        codes = (nibbles(b[..., at + 4 :]) | high << 4) - (16 if kind == Type.Q5_0 else 0)
        m = None if kind == Type.Q5_0 else half(b, 2)
    elif kind == Type.Q6_K:
        low, high = b[..., :128].reshape(n, -1, 2, 1, 64), b[..., 128:192].reshape(n, -1, 2, 1, 32)
        shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 1, 4, 1)
        four = np.concatenate([low & 15, low >> 4], axis=3).reshape(n, -1, 2, 4, 32)
        codes = (four | (high >> shifts & 3) << 4).astype(np.int32) - 32
        sc = np.ascontiguousarray(b[..., 192:208]).view(np.int8).astype(np.int32)
        return Blocks(codes.reshape(n, -1), half(b, 208), None, sc.reshape(n, -1))
    else:
        s = b[..., 4:16].astype(np.int32)
        sc = np.concatenate([s[..., :4] & 63, s[..., 8:] & 15 | s[..., :4] >> 6 << 4], axis=-1)
        mn = np.concatenate([s[..., 4:8] & 63, s[..., 8:] >> 4 | s[..., 4:8] >> 6 << 4], axis=-1)
        q = b[..., 16 if kind == Type.Q4_K else 48 :].reshape(n, -1, 4, 1, 32)
        codes = np.concatenate([q & 15, q >> 4], axis=3).reshape(n, -1, 8, 32).astype(np.int32)
        if kind == Type.Q5_K:
            groups = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)
            codes |= (b[..., None, 16:48] >> groups & 1).astype(np.int32) << 4
        return Blocks(
            codes.reshape(n, -1), half(b, 0), half(b, 2), np.repeat(sc.reshape(n, -1), 2, axis=1), mn.reshape(n, -1)
        )
    assert size == 32
    return Blocks(codes.reshape(n, -1), half(b, 0), m)


def products(kind: Type, rows: Any, x: Any, xd: Floats) -> Floats:
    """The rules' bits: rows of a file times activation rows."""
    b = take_apart(kind, rows)
    if kind not in SUPER:
        return rules.row_products(b.codes, b.d, x, xd, b.m)
    dmin = b.d if b.m is None else b.m
    return rules.super_products(b.codes, b.sc, b.mn, b.d, dmin, x, xd)


def test_the_table_knows_the_sizes() -> None:
    assert {t.name for t in TYPES} == {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K"}
    for kind in TYPES:
        t = entry(kind)
        assert ffi.string(t.name).decode() == kind.name
        assert (t.block, t.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
        assert t.form == (lib.ST_FORM_256 if kind in SUPER else lib.ST_FORM_32)
        assert bool(t.has_min) == (kind in WITH_MIN)
    for none in (Type.F32, Type.F16, Type.BF16, Type.MXFP4, Type.Q2_K):
        assert lib.st_weight_find(int(none)) == -1
    assert lib.st_weight_type_at(-1) == ffi.NULL
    assert lib.st_weight_type_at(lib.ST_WEIGHT_TYPES) == ffi.NULL


def engine_floats(kind: Type, rows: Any) -> Floats:
    t = entry(kind)
    blocks = rows.reshape(-1, t.block_bytes)
    out = np.zeros((len(blocks), t.block), F)
    for i, block in enumerate(blocks):
        t.floats(ptr(np.ascontiguousarray(block), "uint8_t *"), ptr(out[i]))
    return out.reshape(len(rows), -1)


@every_type
@thorough
@given(seed=SEEDS, sizes=st.sampled_from(["ordinary", "wild"]))
def test_blocks_mean_what_gguf_says(kind: Type, seed: int, sizes: str) -> None:
    """Any bytes, to the last bit (zeros may differ in sign)."""
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, kind, 3, 2, sizes)
    want = np.asarray(dequantize(rows, kind), F)
    assert np.array_equal(engine_floats(kind, rows), want)
    b = take_apart(kind, rows)
    size = gguf.GGML_QUANT_SIZES[kind][0]
    d = np.repeat(b.d, size, axis=1)
    if b.sc is not None:
        d = d * np.repeat(b.sc, 16, axis=1).astype(F)
    values = d * b.codes.astype(F)
    if b.mn is not None:
        assert b.m is not None
        values = values - np.repeat(b.m, size, axis=1) * np.repeat(b.mn, 32, axis=1).astype(F)
    elif b.m is not None:
        values = values + np.repeat(b.m, size, axis=1)
    assert np.array_equal(values, want)


# ---- products --------------------------------------------------------------------------------------------------


def activations(kernels: Any, kind: Type, x: Floats) -> tuple[Any, Any, Any]:
    """A row in the form that the type wants: codes, scales, sums."""
    if kind not in SUPER:
        q, d, s = (
            aligned(len(x) * kernels.code_bytes, np.int8),
            aligned(len(x) // 32, F),
            aligned(len(x) // 32, np.int32),
        )
        kernels.quantize(ptr(x), len(x), ptr(q, "int8_t *"), ptr(d), ptr(s, "int32_t *"))
    else:
        blocks = len(x) // 256
        q, d, s = aligned(len(x), np.int8), aligned(blocks, F), aligned(blocks * 12, np.int32)
        kernels.quantize256(ptr(x), len(x), ptr(q, "int8_t *"), ptr(d), ptr(s, "int32_t *"))
    return q, d, s


@thorough
@given(SEEDS, st.integers(1, 12), st.sampled_from(["ordinary", "tiny", "denormal", "large", "mixed", "zero"]))
def test_quantize_by_256(table: Any, seed: int, blocks: int, kind: str) -> None:
    x = floats(np.random.default_rng(seed), blocks * 256, kind)
    x[: 256 * (seed % 2)] = 0
    q, d, s = activations(table, Type.Q4_K, x)
    codes, scales, sums = rules.quantize256(x)
    same(q, codes)
    same(d, scales)
    same(s.view(np.int16).reshape(blocks, 24), sums)


@pytest.mark.parametrize("value", [2.0**-100, 2.0**-101, 3.4028235e38, math.inf, math.nan])
def test_quantize_by_256_at_the_edges(table: Any, value: float) -> None:
    x = np.ones(768, F)
    x[256:512] = np.where(np.arange(256) == 77, F(value), F(0))
    q, d, s = activations(table, Type.Q6_K, x)
    usable = 2.0**-100 <= abs(value) <= 3.4028235e38
    assert q[256:512].tolist() == [127 if usable and i == 77 else 0 for i in range(256)]
    same(d[1:2], np.array([F(value) / F(127) if usable else 0 if abs(value) < 1 else math.nan], F))
    sums = s.view(np.int16).reshape(3, 24)
    assert sums[1].tolist() == [127 if usable and i in (4, 18) else 0 for i in range(24)]
    assert sums[0].tolist() == [127 * 16] * 16 + [127 * 32] * 8


@every_type
@thorough
@given(
    seed=SEEDS,
    blocks=st.integers(1, 19),
    groups=st.integers(1, 3),
    rows=st.integers(1, 8),
    mode=st.sampled_from([lib.ST_STORE, lib.ST_ADD, lib.ST_FMA_WEIGHT]),
    sizes=st.sampled_from(["ordinary", "wild"]),
    values=st.sampled_from(["ordinary", "mixed", "large", "one peak"]),
)
def test_products_packed_and_out_of_the_file(
    table: Any,
    kind: Type,
    seed: int,
    blocks: int,
    groups: int,
    rows: int,
    mode: int,
    sizes: str,
    values: str,
) -> None:
    """Both give the rules' bits for any bytes, with every way to join what is at y."""
    rng = np.random.default_rng(seed)
    size = gguf.GGML_QUANT_SIZES[kind][0]
    blocks = 1 + blocks % 4 if kind in SUPER else blocks
    n, k, at = groups * 16, blocks * size, lib.st_weight_find(int(kind))
    source = random_rows(rng, kind, n, blocks, sizes)
    acts = [activations(table, kind, floats(rng, k, values)) for _ in range(rows)]
    before, weights = rng.normal(0, 1, (rows, n + 32)).astype(F), rng.normal(0, 1, rows).astype(F)
    want = products(kind, source, np.stack([a[0][:k] for a in acts]), np.stack([a[1] for a in acts]))
    old = before[:, 16 : 16 + n]
    want = {lib.ST_STORE: want, lib.ST_ADD: old + want, lib.ST_FMA_WEIGHT: rules.fma(weights[:, None], want, old)}[mode]

    def tile(y: Floats) -> Any:
        t = ffi.new("st_tile *", {"rows": rows, "row_codes": k, "mode": mode})
        for r, (q, d, s) in enumerate(acts):
            t.q[r], t.d[r], t.sum[r] = ptr(q, "int8_t *"), ptr(d), ptr(s, "int32_t *")
            t.y[r], t.weight[r] = ptr(y[r, 16:]), weights[r]
        return t

    stride = lib.st_pack_group_bytes(at, k)
    packed = aligned(stride * groups, np.uint8)
    for g in range(groups):
        part = source[g * 16 : (g + 1) * 16]
        lib.st_pack_group(
            table, at, ptr(part, "uint8_t *"), part.shape[1], 16, k, ptr(packed[g * stride :], "uint8_t *")
        )
    for mapped in (False, True):
        y = before.copy()
        if mapped:
            lib.st_mm_rows(table, at, ptr(source, "uint8_t *"), source.shape[1], groups, k, tile(y), 1)
        else:
            table.mm[at](ptr(packed, "uint8_t *"), stride, groups, k, tile(y))
        same(np.ascontiguousarray(y[:, 16 : 16 + n]), want)
        same(np.ascontiguousarray(y[:, :16]), np.ascontiguousarray(before[:, :16]))
        same(np.ascontiguousarray(y[:, 16 + n :]), np.ascontiguousarray(before[:, 16 + n :]))


@every_type
@thorough
@given(seed=SEEDS)
def test_a_row_is_close_to_exact_arithmetic(kind: Type, seed: int) -> None:
    """The specification against float64 over dequantised weights and activations: only roundings differ."""
    rng = np.random.default_rng(seed)
    w = quantize(rng.normal(0, 0.02, (1, 1536)).astype(F), kind)
    q, d, _ = activations(lib.st_kernels_find(b"scalar", ffi.NULL), kind, floats(rng, 1536, "ordinary"))
    got = entry(kind).row(ptr(w, "uint8_t *"), ptr(q, "int8_t *"), ptr(d), 1536)
    terms = dequantize(w, kind)[0].astype(np.float64) * (q * np.repeat(d, 1536 // len(d)).astype(np.float64))
    assert abs(got - math.fsum(terms)) <= 1e-6 * np.abs(terms).sum()


def test_a_group_that_is_not_full_is_packed_with_zeros() -> None:
    for i in range(lib.ST_WEIGHT_TYPES):
        t, scalar = lib.st_weight_type_at(i), lib.st_kernels_find(b"scalar", ffi.NULL)
        rows = random_rows(np.random.default_rng(i), Type(t.id), 16, 256 // t.block)
        rows[5:] = 0
        size = lib.st_pack_group_bytes(i, 256)
        few, all_ = np.full(size, 255, np.uint8), np.full(size, 255, np.uint8)
        for n, out in ((5, few), (16, all_)):
            lib.st_pack_group(scalar, i, ptr(rows, "uint8_t *"), rows.shape[1], n, 256, ptr(out, "uint8_t *"))
        assert np.array_equal(few, all_)


# Root mean square of (product - float product) / float product over random rows, and a bound a little above it.
ERRORS = {
    Type.Q8_0: 0.009,
    Type.Q6_K: 0.02,
    Type.Q5_K: 0.04,
    Type.Q5_1: 0.04,
    Type.Q5_0: 0.05,
    Type.Q4_K: 0.1,
    Type.IQ4_NL: 0.1,
    Type.Q4_1: 0.1,
    Type.Q4_0: 0.12,
}


@every_type
def test_products_are_as_good_as_the_type_can_be(kind: Type) -> None:
    """Quantising weights and activations costs what the type's bits cost, and not more."""
    rng = np.random.default_rng(7)
    n, k = 64, 1024
    w, x = rng.normal(0, 0.02, (n, k)).astype(F), rng.normal(0, 1, (8, k)).astype(F)
    scalar = lib.st_kernels_find(b"scalar", ffi.NULL)
    acts = [activations(scalar, kind, row) for row in x]
    got = products(kind, quantize(w, kind), np.stack([a[0] for a in acts]), np.stack([a[1] for a in acts]))
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    error = math.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2))
    assert ERRORS[kind] / 3 < error < ERRORS[kind]


# ---- whole models ----------------------------------------------------------------------------------------------

WIDE = Shape(embd=256, heads=4, head_dim=64, rot=16, value_heads=4, state=64, ff=256, shared_ff=512, layers=2)
ANSWER = {"logprobs": 4, "temperature": 1, "seed": 5}
IDS = [int(i) for i in np.random.default_rng(2).integers(0, WIDE.vocab, 70)]


def answer(path: Path, *args: str) -> tuple[Any, ...]:
    with Engine(*args, model=path) as engine:
        a = engine.generate(IDS, 8, timeout=120, **ANSWER)
    return a.tokens, a.logprobs, a.tops


@pytest.mark.parametrize(
    ("dense", "experts"),
    [
        (Type.Q4_K, Type.Q6_K),
        (Type.Q5_K, Type.Q4_K),
        (Type.Q6_K, Type.IQ4_NL),  # activations in both forms
        (Type.Q4_1, Type.Q5_K),
        (Type.Q5_1, Type.Q5_0),
        (Type.F16, Type.BF16),
    ],
    ids=lambda t: t.name,
)
def test_models_give_the_same_bits_packed_or_mapped_on_every_table(tmp_path: Path, dense: Type, experts: Type) -> None:
    path = tiny_model.model(WIDE, 3, dense, experts).write(tmp_path / "m.gguf")
    first = answer(path, "--threads=1", "--isa=scalar")
    for isa in ISAS[1:]:
        if lib.st_kernels_find(isa.encode(), ffi.NULL) != ffi.NULL:
            assert answer(path, "--threads=2", f"--isa={isa}") == first
    assert answer(path, "--threads=2", "--weights=mapped") == first
    assert answer(path, "--threads=3", "--weights=mapped", "--chunk=5") == first


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16], ids=lambda t: t.name)
def test_half_floats_are_held_as_q8_0_or_as_they_are(tmp_path: Path, kind: Type) -> None:
    """The same bits as a file of such Q8_0 blocks (codes by the value of the f16 scale), or of those floats."""
    path = tiny_model.model(WIDE, 3, kind, kind).write(tmp_path / "half.gguf")
    wide = tiny_model.model(WIDE, 3, Type.F32, Type.F32)
    for tensor in wide.tensors.values():
        if tensor.values.ndim > 1:
            tensor.values = np.asarray(dequantize(quantize(tensor.values, kind), kind), F)
    for name, t in tiny_model.model(WIDE, 3, kind, kind).tensors.items():
        if t.type == Type.F32:
            wide.tensors[name] = t
    as_floats = wide.write(tmp_path / "floats.gguf")
    assert answer(path, "--dense=as-is") == answer(as_floats) == answer(as_floats, "--weights=mapped")

    blocks = tiny_model.model(WIDE, 3, kind, kind)
    for name, t in blocks.tensors.items():
        if t.type != kind or name == "token_embd.weight":
            continue
        values = np.asarray(dequantize(quantize(t.values, kind), kind), F)
        made = [rules.quantize_kv(row) for row in values.reshape(-1, 32)]
        held = np.stack([codes.astype(F) * F(d) for codes, d in made]).reshape(values.shape)
        t.values, t.type = held, Type.F32
        exact = quantize(held, Type.Q8_0)
        raw = np.concatenate([np.array([d]).view(np.uint8) for _, d in made]).reshape(*values.shape[:-1], -1, 2)
        body = np.stack([codes for codes, _ in made]).view(np.uint8).reshape(*values.shape[:-1], -1, 32)
        assert exact.shape == (*values.shape[:-1], values.shape[-1] // 32 * 34)
        t.raw = np.concatenate([raw, body], axis=-1).reshape(exact.shape)
        t.type = Type.Q8_0
    same_file = blocks.write(tmp_path / "blocks.gguf")
    assert answer(path) == answer(same_file)
    assert answer(path) != answer(as_floats)


def test_the_form_of_dense_weights_is_part_of_the_identity(tmp_path: Path) -> None:
    path = tiny_model.model(WIDE, 3, Type.F16, Type.F16).write(tmp_path / "half.gguf")
    seen = []
    for args in ([], ["--weights", "mapped"], ["--dense", "as-is"]):
        with Engine(*args, model=path) as engine:
            seen.append(engine.info["identity"])
    assert seen[0] == seen[1] != seen[2]


def test_a_matrix_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    m = tiny_model.model(WIDE, 3, Type.F16, Type.Q4_0)
    m.tensors["blk.1.attn_k.weight"].values[3, 7] = np.inf
    done = run("--model", m.write(tmp_path / "m.gguf"))
    assert done.returncode == 78
    assert "blk.1.attn_k.weight holds a value that is not finite (at 775)" in done.stderr


def resident_kib(pid: int, path: Path) -> tuple[int, int]:
    """Resident and mapped KiB of a file in a process."""
    resident, mapped, ours = 0, 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        word, *rest = line.split()
        if not word.endswith(":"):
            ours = line.endswith(str(path))
        elif ours and word in ("Rss:", "Size:"):
            resident, mapped = (
                (resident + int(rest[0]), mapped) if word == "Rss:" else (resident, mapped + int(rest[0]))
            )
    return resident, mapped


def test_repacked_pages_of_the_file_are_given_back() -> None:
    with Engine(model=MODEL) as engine:
        resident, mapped = resident_kib(engine.process.pid, MODEL)
        assert mapped > 8000
        assert resident < mapped / 10
    with Engine("--weights", "mapped", model=MODEL) as engine:
        engine.generate([1, 2, 3], 2)
        resident, mapped = resident_kib(engine.process.pid, MODEL)
        assert resident > mapped / 4
        assert int(engine.info["weights_mib"]) < 8
