"""Every kernel of every table that this processor has, bit for bit against the rules written again in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata_native import ffi, lib

from tests.native import arithmetic as rules
from tests.native.arithmetic import F, Floats
from tests.native.driver import run

ISAS = ("scalar", "avx2", "avxvnni", "avx512")
SEEDS = st.integers(0, 2**32 - 1)
thorough = settings(deadline=None, max_examples=250)
quick = settings(deadline=None, max_examples=100)


@pytest.fixture(scope="module", params=ISAS)
def table(request: pytest.FixtureRequest) -> Any:
    """One table of kernels; its test is skipped where the processor lacks the instructions."""
    found = lib.st_kernels_find(request.param.encode(), ffi.NULL)
    if found == ffi.NULL:
        pytest.skip(f"this processor has no {request.param}")
    assert ffi.string(found.isa).decode() == request.param
    return found


@pytest.fixture(autouse=True)
def _floats_may_overflow() -> Any:
    with np.errstate(all="ignore"):
        yield


# ---- values ----------------------------------------------------------------------------------------------------

SIZES: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "ordinary": lambda r, n: r.normal(0, 1, n),
    "denormal": lambda r, n: r.normal(0, 1e-40, n),
    "tiny": lambda r, n: r.normal(0, 1e-30, n),
    "large": lambda r, n: r.normal(0, 1e9, n),
    "halves": lambda r, n: r.integers(-8, 9, n) / 2,
    "zero": lambda r, n: np.where(r.random(n) < 0.5, 0.0, -0.0),
    "one peak": lambda r, n: np.where(np.arange(n) == r.integers(n), 300.0, r.normal(0, 1e-3, n)),
}
KINDS = st.sampled_from([*SIZES, "mixed", "mixed"])


def floats(rng: np.random.Generator, n: int, kind: str) -> Floats:
    """n float32 values of a size, or of every size."""
    if kind != "mixed":
        return np.asarray(SIZES[kind](rng, n), F)
    columns = np.stack([make(rng, n) for make in SIZES.values()])
    return np.asarray(columns[rng.integers(0, len(columns), n), np.arange(n)], F)


def halves(rng: np.random.Generator, shape: tuple[int, ...], kind: str, positive: bool = False) -> Any:
    """f16 scales: ordinary ones, or of every size down to subnormal and zero."""
    n = math.prod(shape)
    size = rng.normal(0, 0.01, n)
    if kind == "wild":
        size = np.choose(rng.integers(0, 4, n), [size, np.zeros(n), rng.normal(0, 1e-6, n), rng.uniform(-6e4, 6e4, n)])
    return (np.abs(size) if positive else size).astype(np.float16).reshape(shape)


def aligned(n: int, dtype: Any) -> Any:
    """A zeroed array that begins at a multiple of 64 bytes, as the engine's do."""
    size = np.dtype(dtype).itemsize
    raw = np.zeros(n * size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n * size].view(dtype)


def ptr(a: Any, ctype: str = "float *") -> Any:
    """The array's memory for a call; the array must outlive it and be contiguous."""
    assert a.flags.c_contiguous
    return ffi.cast(ctype, a.ctypes.data)


def same(got: Any, want: Any) -> None:
    """Equal bits, or NaN in both."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.dtype == F:
        differs = (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
        at = np.flatnonzero(differs)
        assert not at.size, (
            f"{at.size} of {got.size} differ, first at {at[0]}: {got.flat[at[0]]!r}, {want.flat[at[0]]!r}"
        )
    else:
        assert np.array_equal(got, want)


def called(function: Any, n: int, *args: Any) -> Floats:
    """What a kernel writes to its last argument. Guards on both sides must stay as they are."""
    out = np.full(n + 64, 7.25, F)
    function(*args, ptr(out[32:]))
    assert (out[:32] == 7.25).all()
    assert (out[n + 32 :] == 7.25).all(), "the kernel wrote behind its output"
    return out[32 : n + 32].copy()


# ---- the oracle itself -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=500)
@given(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 3)
def test_the_emulated_fma_rounds_once(a: float, b: float, c: float) -> None:
    """Against exact rational arithmetic, whose only rounding is the conversion at the end."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    got = rules.fma(F(a), F(b), F(c))[()]
    if abs(exact) >= Fraction(2) ** 128 - Fraction(2) ** 103:
        assert np.isinf(got)
        return
    below, above = np.nextafter(got, F(-np.inf)), np.nextafter(got, F(np.inf))
    error = abs(Fraction(float(got)) - exact)
    for other in (below, above):
        if np.isfinite(other):
            away = abs(Fraction(float(other)) - exact)
            assert error < away or (error == away and got.view(np.uint32) % 2 == 0)


def test_the_oracle_is_accurate() -> None:
    """Its functions are what their names say, against float64."""
    x = np.linspace(-86.9, 87.9, 100001, dtype=F)
    assert (np.abs(rules.exp(x).astype(float) / np.exp(x.astype(float)) - 1)).max() < 1.2e-7
    x = np.linspace(-80, 80, 100001, dtype=F)
    exact = 1 / (1 + np.exp(-x.astype(float)))
    assert (np.abs(rules.sigmoid(x).astype(float) / exact - 1)).max() < 2e-7
    nonzero = x[x != 0]
    silu = nonzero.astype(float) / (1 + np.exp(-nonzero.astype(float)))
    assert (np.abs(rules.silu(nonzero).astype(float) / silu - 1)).max() < 2e-7


def test_attention_is_accurate() -> None:
    """Int8 codes and 15-bit weights against the same sum in float64."""
    rng = np.random.default_rng(1)
    npos, hd = 700, 128
    q = rng.normal(0, 1, hd).astype(F)
    keys, values = rng.integers(-127, 128, (2, npos, hd)).astype(np.int8)
    kscale, vscale = (rng.uniform(0.005, 0.02, (npos, 2)).astype(np.float16) for _ in range(2))
    wide = [np.repeat(s.astype(float), 64, axis=1) for s in (kscale, vscale)]
    score = (keys * wide[0]) @ q.astype(float) / math.sqrt(hd)
    p = np.exp(score - score.max())
    exact = (p / p.sum()) @ (values * wide[1])
    got = rules.attend(q, keys, kscale, values, vscale, 1 / math.sqrt(hd))
    assert np.abs(got - exact).max() < 0.02 * np.abs(exact).max()


# ---- tables ----------------------------------------------------------------------------------------------------


def test_tables_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    why = ffi.new("const char **")
    for name in (b"sse9", b"AVX2", b"avx"):
        assert lib.st_kernels_find(name, why) == ffi.NULL
        assert b"choose auto, avx512, avxvnni, avx2 or scalar" in ffi.string(why[0])
    monkeypatch.setenv("STRATA_ISA", "scalar")
    for name in (ffi.NULL, b""):
        assert ffi.string(lib.st_kernels_find(name, ffi.NULL).isa) == b"scalar"
    monkeypatch.delenv("STRATA_ISA")
    best = ffi.string(lib.st_kernels_find(b"auto", ffi.NULL).isa)
    assert best == ffi.string(lib.st_kernels_find(ffi.NULL, ffi.NULL).isa)


@pytest.mark.parametrize("isa", ISAS)
def test_the_engine_tests_its_kernels(isa: str) -> None:
    if lib.st_kernels_find(isa.encode(), ffi.NULL) == ffi.NULL:
        pytest.skip(f"this processor has no {isa}")
    done = run("--self-test", "200", "--isa", isa, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"self-test of {isa}: equals the specification bit for bit\n"


# ---- products --------------------------------------------------------------------------------------------------


def quantized(table: Any, x: Floats) -> tuple[Any, Any, Any]:
    """A row in the table's form: codes (and what it keeps behind them), scales, sums."""
    q = aligned(len(x) * table.code_bytes, np.int8)
    d, s = aligned(len(x) // 32, F), aligned(len(x) // 32, np.int32)
    table.quantize(ptr(x), len(x), ptr(q, "int8_t *"), ptr(d), ptr(s, "int32_t *"))
    return q, d, s


@thorough
@given(SEEDS, st.integers(1, 80), KINDS)
def test_quantize(table: Any, seed: int, blocks: int, kind: str) -> None:
    x = floats(np.random.default_rng(seed), blocks * 32, kind)
    q, d, s = quantized(table, x)
    codes, scales, sums = rules.quantize(x)
    same(q[: len(x)], codes)
    same(d, scales)
    same(s, sums)


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 2.0**-100, 2.0**-101, 2.0**-149, 3.4028235e38, math.inf, -math.inf, math.nan]
)
def test_quantize_at_the_edges(table: Any, value: float) -> None:
    """All zero below 2^-100, and for a block that holds what is no number: that one's scale is NaN. Its neighbours are
    as ever."""
    x = np.ones(96, F)
    x[40] = value
    x[32:64] = np.where(np.arange(32, 64) == 40, F(value), F(0))
    q, d, s = quantized(table, x)
    usable = 2.0**-100 <= abs(value) <= 3.4028235e38
    assert q[32:64].tolist() == [127 if usable and i == 8 else 0 for i in range(32)]
    assert s.tolist() == [127 * 32, 127 if usable else 0, 127 * 32]
    same(d[1:2], np.array([F(value) / F(127) if usable else 0 if abs(value) < 1 else math.nan], F))
    assert d[0] == d[2] == F(1) / F(127)


def file_rows(rng: np.random.Generator, kind: int, n: int, blocks: int, sizes: str) -> tuple[Any, Any, Floats]:
    """n rows as a file has them, their codes [n][k] and scales [n][blocks]."""
    scales = halves(rng, (n, blocks), sizes)
    codes: Any
    if kind == lib.ST_W_Q8_0:
        codes = rng.integers(-128, 128, (n, blocks, 32)).astype(np.int8)
        packed = codes.view(np.uint8)
    else:
        nibbles = rng.integers(0, 16, (n, blocks, 32)).astype(np.uint8)
        codes = nibbles.astype(np.int8) - np.int8(8)
        packed = nibbles[..., :16] | nibbles[..., 16:] << 4
    rows = np.concatenate([scales.view(np.uint8).reshape(n, blocks, 2), packed], axis=2)
    return np.ascontiguousarray(rows.reshape(n, -1)), codes.reshape(n, -1), scales.astype(F)


@pytest.mark.parametrize("kind", [lib.ST_W_Q8_0, lib.ST_W_Q4_0], ids=["q8_0", "q4_0"])
@thorough
@given(
    seed=SEEDS,
    blocks=st.one_of(st.integers(1, 20), st.sampled_from([8, 16, 64])),
    missing=st.integers(0, 15),
    groups=st.integers(1, 3),
    rows=st.integers(1, 8),
    mode=st.sampled_from([lib.ST_STORE, lib.ST_ADD, lib.ST_FMA_WEIGHT]),
    sizes=st.sampled_from(["ordinary", "wild"]),
    values=KINDS,
)
def test_products(
    table: Any,
    kind: int,
    seed: int,
    blocks: int,
    missing: int,
    groups: int,
    rows: int,
    mode: int,
    sizes: str,
    values: str,
) -> None:
    """A tile of 1 to 8 rows times packed groups, the last of them perhaps not full; stored, added, or weighed."""
    rng = np.random.default_rng(seed)
    n, k, lanes = groups * 16 - missing, blocks * 32, groups * 16
    source, codes, scales = file_rows(rng, kind, n, blocks, sizes)
    stride = lib.st_pack_group_bytes(kind, k)
    packed = aligned(stride * groups, np.uint8)
    for g in range(groups):
        part = np.ascontiguousarray(source[g * 16 : (g + 1) * 16])
        to = ptr(packed[g * stride :], "uint8_t *")
        lib.st_pack_group(table, kind, ptr(part, "uint8_t *"), part.shape[1], len(part), k, to)
    x = np.stack([floats(rng, k, values) for _ in range(rows)])
    acts = [quantized(table, row) for row in x]
    before = rng.normal(0, 1, (rows, lanes + 32)).astype(F)
    weights = rng.normal(0, 1, rows).astype(F)
    y = before.copy()
    tile = ffi.new("st_tile *", {"rows": rows, "row_codes": k, "mode": mode})
    for r, (q, d, s) in enumerate(acts):
        tile.q[r], tile.d[r], tile.sum[r] = ptr(q, "int8_t *"), ptr(d), ptr(s, "int32_t *")
        tile.y[r], tile.weight[r] = ptr(y[r, 16:]), weights[r]
    table.mm[kind](ptr(packed, "uint8_t *"), stride, groups, k, tile)

    codes = np.concatenate([codes, np.zeros((missing, k), np.int8)])
    scales = np.concatenate([scales, np.zeros((missing, blocks), F)])
    want = rules.row_products(codes, scales, np.stack([a[0][:k] for a in acts]), np.stack([a[1] for a in acts]))
    old = before[:, 16 : 16 + lanes]
    joined = {lib.ST_STORE: want, lib.ST_ADD: old + want, lib.ST_FMA_WEIGHT: rules.fma(weights[:, None], want, old)}[
        mode
    ]
    same(y[:, 16 : 16 + n].copy(), joined[:, :n].copy())
    same(y[:, :16].copy(), before[:, :16].copy())
    same(y[:, 16 + lanes :].copy(), before[:, 16 + lanes :].copy())


def test_a_row_alone_and_in_company_is_the_same(table: Any) -> None:
    """What exactness rests on, said without an oracle: a row's products do not know its tile."""
    rng, k = np.random.default_rng(3), 384
    for kind in (lib.ST_W_Q8_0, lib.ST_W_Q4_0):
        mm, stride = table.mm[kind], lib.st_pack_group_bytes(kind, k)
        packed = aligned(stride, np.uint8)
        source, _, _ = file_rows(rng, kind, 16, 12, "ordinary")
        lib.st_pack_group(table, kind, ptr(source, "uint8_t *"), source.shape[1], 16, k, ptr(packed, "uint8_t *"))
        acts = [quantized(table, floats(rng, k, "ordinary")) for _ in range(8)]

        def product(rows: list[int], mm: Any = mm, packed: Any = packed, acts: Any = acts, stride: int = stride) -> Any:
            y = np.zeros((len(rows), 16), F)
            tile = ffi.new("st_tile *", {"rows": len(rows), "row_codes": k, "mode": lib.ST_STORE})
            for i, r in enumerate(rows):
                q, d, s = acts[r]
                tile.q[i], tile.d[i], tile.sum[i] = ptr(q, "int8_t *"), ptr(d), ptr(s, "int32_t *")
                tile.y[i] = ptr(y[i])
            mm(ptr(packed, "uint8_t *"), stride, 1, k, tile)
            return y

        alone = np.concatenate([product([r]) for r in range(8)])
        for size in range(1, 9):
            for first in range(0, 9 - size):
                same(product(list(range(first, first + size))), alone[first : first + size])
        same(product([7, 0, 3]), alone[[7, 0, 3]])


@thorough
@given(SEEDS, st.integers(1, 9), st.one_of(st.integers(1, 200), st.sampled_from([256, 4095, 4096, 4097, 5000])), KINDS)
def test_dots(table: Any, seed: int, n: int, k: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    w, x = floats(rng, n * k, kind).reshape(n, k), floats(rng, k, kind)
    same(called(table.dots, n, ptr(w), n, k, ptr(x)), rules.strided(w, np.broadcast_to(x, w.shape)))


# ---- rows ------------------------------------------------------------------------------------------------------

LENGTHS = st.one_of(st.integers(1, 130), st.sampled_from([384, 1000, 4100]))


@thorough
@given(SEEDS, LENGTHS, KINDS, st.sampled_from([1e-6, 1e-5, 0.0]))
def test_norms(table: Any, seed: int, n: int, kind: str, eps: float) -> None:
    rng = np.random.default_rng(seed)
    x, w, g = (floats(rng, n, kind) for _ in range(3))
    same(called(table.rms_norm, n, ptr(x), ptr(w), n, eps), rules.rms_norm(x, w, eps))
    same(called(table.l2_norm, n, ptr(x), n, 0.125), rules.l2_norm(x, 0.125))
    same(called(table.norm_gate, n, ptr(x), ptr(w), ptr(g), n, eps), rules.rms_norm(x, w, eps) * rules.silu(g))


SPECIAL = np.array(
    [0.0, -0.0, 88, 88.5, -87, -87.00001, -87.5, -104, 1e30, -1e30, math.inf, -math.inf, math.nan, 1e-45, -1e-45], F
)


@thorough
@given(SEEDS, LENGTHS, KINDS, st.booleans())
def test_gates(table: Any, seed: int, n: int, kind: str, special: bool) -> None:
    rng = np.random.default_rng(seed)
    x, g = floats(rng, n, kind), floats(rng, n, kind) * F(20)
    if special:
        g = np.where(rng.random(n) < 0.3, rng.choice(SPECIAL, n), g).astype(F)
    same(called(table.silu_mul, n, ptr(g), ptr(x), n), rules.silu(g) * x)
    same(called(table.sigmoid_mul, n, ptr(x), ptr(g), n), x * rules.sigmoid(g))
    same(called(table.exp_sub, n, ptr(g), n, 0.25, 0.5), rules.exp((g - F(0.25)) * F(0.5)))


def test_exp_over_its_whole_range(table: Any) -> None:
    """Also what sampling uses (st_exp_sub), and the claimed accuracy."""
    x = np.concatenate([np.linspace(-110, 100, 40001, dtype=F), SPECIAL])
    want = rules.exp(x)
    same(called(table.exp_sub, len(x), ptr(x), len(x), 0.0, 1.0), want)
    same(called(lib.st_exp_sub, len(x), ptr(x), len(x), 0.0, 1.0), want)


@thorough
@given(SEEDS, st.integers(1, 70), st.integers(0, 20), KINDS)
def test_conv4_silu(table: Any, seed: int, n: int, more: int, kind: str) -> None:
    """n of a wider matrix's channels; the four rows lie anywhere."""
    rng = np.random.default_rng(seed)
    w, u = floats(rng, 4 * (n + more), kind).reshape(4, -1), floats(rng, 4 * n, kind).reshape(4, n)
    taps = ffi.new("float *[4]", [ptr(row) for row in u])
    same(called(table.conv4_silu, n, ptr(w), n + more, taps, n), rules.conv4_silu(w[:, :n], u))


@thorough
@given(
    SEEDS, st.sampled_from([4, 16, 24, 32, 48, 64, 128]), st.one_of(st.integers(1, 70), st.sampled_from([128])), KINDS
)
def test_delta_step(table: Any, seed: int, dk: int, dv: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    S = floats(rng, dk * dv, kind).reshape(dk, dv)
    decay, beta = F(rng.uniform(0, 1)), F(rng.uniform(0, 1))
    state = np.full(dk * dv + 32, 7.25, F)
    state[16:-16] = S.reshape(-1)
    for _ in range(3):
        q, k, v = floats(rng, dk, kind), floats(rng, dk, kind), floats(rng, dv, kind)
        got = called(table.delta_step, dv, ptr(state[16:]), dk, dv, ptr(q), ptr(k), ptr(v), decay, beta)
        S, want = rules.delta_step(S, q, k, v, decay, beta)
        same(got, want)
        same(state[16:-16].copy(), S.reshape(-1))
    assert (state[:16] == 7.25).all() and (state[-16:] == 7.25).all()


# ---- attention -------------------------------------------------------------------------------------------------


@thorough
@given(SEEDS, st.integers(1, 64), st.one_of(KINDS, st.sampled_from(["huge", "special"])))
def test_quantize_kv(table: Any, seed: int, n: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1e37, n).astype(F) if kind == "huge" else floats(rng, n, "mixed" if kind == "special" else kind)
    if kind == "special":
        x[rng.integers(n)] = rng.choice([math.inf, -math.inf, math.nan])
    q = np.full(n + 8, 99, np.int8)
    scale = table.quantize_kv(ptr(x), n, ptr(q, "int8_t *"))
    codes, d = rules.quantize_kv(x)
    assert scale == int(np.float16(d).view(np.uint16))
    same(q[:n], codes)
    assert (q[n:] == 99).all()


def attention_block(hd: int, keys: Any, kscale: Any, values: Any, vscale: Any) -> Any:
    """Up to 64 positions in the layout of kernels.h, 64 bytes in; noise behind them must not count."""
    n, groups = len(keys), -(-hd // 64)
    block = aligned(64 + hd * 128 + groups * 256, np.uint8)
    block[:] = np.random.default_rng(n).integers(0, 256, len(block))
    at = block[64:]
    k = at[: hd * 64].reshape(hd // 4, 64, 4)
    k[:, :n] = (keys.astype(np.int16) + 128).astype(np.uint8).reshape(n, hd // 4, 4).transpose(1, 0, 2)
    v = at[hd * 64 : hd * 128].view(np.int8).reshape(16, hd, 4)
    for i in range(n):
        v[i // 4, :, i % 4] = values[i]
    scales = at[hd * 128 :].view(np.float16).reshape(2, groups, 64)
    scales[:] = 0.01
    scales[0, :, :n], scales[1, :, :n] = kscale.T, vscale.T
    return block


@quick
@given(
    SEEDS,
    st.sampled_from([4, 32, 64, 72, 80, 128, 256]),
    st.one_of(st.integers(1, 140), st.sampled_from([511, 512, 513, 1200])),
    st.sampled_from(["ordinary", "wild"]),
    KINDS,
)
def test_attend(table: Any, seed: int, hd: int, npos: int, sizes: str, kind: str) -> None:
    rng = np.random.default_rng(seed)
    groups = -(-hd // 64)
    keys, values = rng.integers(-127, 128, (2, npos, hd)).astype(np.int8)
    kscale, vscale = (halves(rng, (npos, groups), sizes, positive=True) for _ in range(2))
    query = floats(rng, hd, kind)
    parts = [slice(b, min(b + 64, npos)) for b in range(0, npos, 64)]
    blocks = [attention_block(hd, keys[p], kscale[p], values[p], vscale[p]) for p in parts]
    out = np.full(hd + 32, 7.25, F)
    scale = float(F(1) / np.sqrt(F(hd)))
    pointers = ffi.new("uint8_t *[]", [ptr(b, "uint8_t *") for b in blocks])
    a = {
        "blocks": pointers,
        "offset": 64,
        "hd": hd,
        "npos": npos,
        "scale": scale,
        "query": ptr(query),
        "out": ptr(out[16:]),
    }
    table.attend(ffi.new("st_attend *", a))
    same(out[16:-16].copy(), rules.attend(query, keys, kscale, values, vscale, scale))
    assert (out[:16] == 7.25).all() and (out[-16:] == 7.25).all()
