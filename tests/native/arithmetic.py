"""The rules of native/src/arith.h written a second time, in numpy: an oracle that shares no code with the kernels.

Every function takes and gives float32 arrays and rounds after each operation, as the rules say; `fma` is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[Any]
F = np.float32
TINY = F(2.0**-100)
LARGEST = np.finfo(np.float32).max


def fma(a: Any, b: Any, c: Any) -> Floats:
    """a * b + c, rounded once. The product is exact in float64; the sum is rounded to odd there, which leaves the
    second rounding, to float32, as if it were the only one (Boldo and Melquiond)."""
    p = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    c = np.asarray(c, np.float64)
    p, c = np.broadcast_arrays(p, c)
    s = np.asarray(p + c)
    part = s - p
    error = (p - (s - part)) + (c - part)
    bits = s.view(np.int64)
    inexact_and_even = np.isfinite(s) & (error != 0) & (bits & 1 == 0)
    step = np.where((error > 0) == (s > 0), 1, -1)
    return np.where(inexact_and_even, bits + step, bits).view(np.float64).astype(np.float32)


def tree(p: Floats) -> Floats:
    """Halving tree over the last axis of 32 partial sums."""
    while p.shape[-1] > 1:
        half = p.shape[-1] // 2
        p = p[..., :half] + p[..., half:]
    return p[..., 0]


def strided(a: Floats, b: Floats | None) -> Floats:
    """Rule 4 over the last axis: <a, b>, or the sum of a."""
    total = np.zeros(a.shape[:-1], F)
    for start in range(0, a.shape[-1], 4096):
        partial = np.zeros((*a.shape[:-1], 32), F)
        end = min(start + 4096, a.shape[-1])
        for i in range(start, end, 32):
            n = min(32, end - i)
            x = a[..., i : i + n]
            now = partial[..., :n]
            partial[..., :n] = now + x if b is None else fma(x, b[..., i : i + n], now)
        total = total + tree(partial)
    return total


def exp(x: Floats) -> Floats:
    """exp by its polynomial; 0 below -87, clamped above 88, NaN stays."""
    y = np.minimum(np.where(x >= F(-87), x, F(0)), F(88))
    n = np.rint(y * F(1.44269504088896341))
    r = fma(n, F(2.12194440e-4), fma(n, F(-0.693359375), y))
    p = np.full_like(y, F(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, F(c))
    value = (fma(p, r * r, r) + F(1)) * np.ldexp(F(1), n.astype(np.int32)).astype(F)
    return np.where(np.isnan(x), x, np.where(x >= F(-87), value, F(0))).astype(F)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e^-x)."""
    return np.asarray(F(1) / (F(1) + exp(-x)), F)


def silu(x: Floats) -> Floats:
    """x / (1 + e^-x)."""
    return np.asarray(x / (F(1) + exp(-x)), F)


def rms_norm(x: Floats, w: Floats, eps: float) -> Floats:
    r = F(1) / np.sqrt(strided(x, x) / F(len(x)) + F(eps))
    return np.asarray((x * r) * w, F)


def l2_norm(x: Floats, scale: float) -> Floats:
    r = F(1) / np.sqrt(strided(x, x) + F(1e-6))
    return np.asarray((x * r) * F(scale), F)


def scale_of(amax: Floats) -> Floats:
    """Rule 2: amax / 127; 0 below 2^-100, NaN where a value is none."""
    return np.where(
        amax >= TINY, np.where(amax <= LARGEST, amax / F(127), F(np.nan)), np.where(np.isnan(amax), amax, F(0))
    )


def quantize(x: Floats) -> tuple[Ints, Floats, Ints]:
    """Rule 2: int8 codes, and for each block of 32 its scale and the sum of its codes."""
    blocks = x.reshape(-1, 32)
    amax = np.abs(blocks).max(axis=1)
    usable = (amax >= TINY) & (amax <= LARGEST)
    inv = np.where(usable, F(127) / amax, F(0)).astype(F)
    codes = np.where(usable[:, None], np.rint(blocks * inv[:, None]), F(0)).astype(np.int8)
    return codes.reshape(-1), scale_of(amax), codes.sum(axis=1, dtype=np.int32)


def quantize_kv(x: Floats) -> tuple[Ints, np.float16]:
    """Rule 6: codes made with the value of the f16 scale."""
    amax = np.abs(x).max()
    d = np.float16(min(amax / F(127), F(65504)) if amax <= LARGEST else F(np.nan))
    if not d > 0:
        return np.zeros(len(x), np.int8), d
    return np.clip(np.rint(x * (F(1) / F(d))), -127, 127).astype(np.int8), d


def quantize256(x: Floats) -> tuple[Ints, Floats, Ints]:
    """Rule 2 for super-blocks: int8 codes, a scale for each 256 values, and for those sixteen sums of 16 codes and
    eight of 32."""
    blocks = x.reshape(-1, 256)
    amax = np.abs(blocks).max(axis=1)
    usable = (amax >= TINY) & (amax <= LARGEST)
    inv = np.where(usable, F(127) / amax, F(0)).astype(F)
    codes = np.where(usable[:, None], np.rint(blocks * inv[:, None]), F(0)).astype(np.int8)
    sums = [codes.reshape(-1, 256 // n, n).sum(axis=2, dtype=np.int16) for n in (16, 32)]
    return codes.reshape(-1), scale_of(amax), np.concatenate(sums, axis=1)


def row_products(codes: Ints, scales: Floats, x: Ints, d: Floats, mins: Floats | None = None) -> Floats:
    """Rule 3. Weight codes [n][k], scales and minima [n][k / 32] times activation rows x [m][k], d [m][k / 32]:
    [m][n]."""
    n, k = codes.shape
    m, blocks = len(x), k // 32
    w = codes.reshape(n, blocks, 32).astype(np.int32)
    rows = x.reshape(m, blocks, 32).astype(np.int32)
    isum, bsum = np.einsum("nbi,mbi->mnb", w, rows), rows.sum(axis=2).astype(F)
    total = np.zeros((m, n), F)
    for segment in range(0, blocks, 8):
        acc = np.zeros((m, n), F)
        for b in range(segment, min(segment + 8, blocks)):
            acc = fma(scales[None, :, b] * d[:, b, None], isum[:, :, b].astype(F), acc)
            if mins is not None:
                acc = fma(mins[None, :, b] * d[:, b, None], bsum[:, b, None], acc)
        total = total + acc
    return total


def super_products(codes: Ints, sc: Ints, mn: Ints | None, d: Floats, dmin: Floats, x: Ints, xd: Floats) -> Floats:
    """Rule 3 for super-blocks: codes [n][k], group scales sc [n][k / 16], minima mn [n][k / 32] (None: the type has
    none), d and dmin [n][k / 256] times rows x [m][k], xd [m][k / 256]: [m][n]."""
    n, k = codes.shape
    m, blocks = len(x), k // 256
    w = (codes.astype(np.int32) * np.repeat(sc, 16, axis=1)).reshape(n, blocks, 256)
    rows = x.astype(np.int32).reshape(m, blocks, 256)
    isum = np.einsum("nbi,mbi->mnb", w, rows)
    total = np.zeros((m, n), F)
    for b in range(blocks):
        acc = fma(d[None, :, b] * xd[:, b, None], isum[:, :, b].astype(F), F(0))
        if mn is not None:
            wide = np.repeat(mn, 32, axis=1).reshape(n, blocks, 256)[:, b]
            msum = rows[:, b] @ wide.T.astype(np.int32)
            acc = fma(-(dmin[None, :, b] * xd[:, b, None]), msum.astype(F), acc)
        total = total + acc
    return total


def conv4_silu(w: Floats, u: Floats) -> Floats:
    """w [4][n], u [4][n], oldest to newest."""
    a = np.zeros(w.shape[1], F)
    for t in range(4):
        a = fma(w[t], u[t], a)
    return silu(a)


def delta_step(
    S: Floats, q: Floats, k: Floats, v: Floats, decay: np.float32, beta: np.float32
) -> tuple[Floats, Floats]:
    """Rule 7: the new state [dk][dv] and the output [dv]."""
    dk, dv = S.shape

    def along_keys(term: Any) -> Floats:
        total = np.zeros(dv, F)
        for start in range(0, dk, 32):
            a = np.zeros(dv, F)
            for i in range(start, min(start + 32, dk)):
                a = term(i, a)
            total = total + a
        return total

    d = beta * (v - along_keys(lambda i, a: fma(k[i], S[i], a)) * decay)
    new = fma(k[:, None], d[None, :], S * decay)
    return new, along_keys(lambda i, a: fma(q[i], new[i], a))


def fold(m: Any, den: Any, acc: Floats, bm: Any, bden: Any, block: Floats) -> tuple[Any, Any, Floats]:
    """Join a running softmax {m, den, acc} with another."""
    top = max(m, bm)
    ea, eb = exp(np.array([m - top, bm - top], F))
    return top, fma(den, ea, bden * eb), fma(acc, ea, block * eb)


def attend(q: Floats, keys: Ints, kscale: Ints, values: Ints, vscale: Ints, scale: float) -> Floats:
    """Rule 6. keys, values: int8 [npos][hd]; kscale, vscale: f16 [npos][groups]."""
    npos, hd = keys.shape
    groups = range(0, hd, 64)
    score = np.zeros(npos, F)
    for g, at in enumerate(groups):
        codes, d = quantize_kv(q[at : at + 64])
        isum = keys[:, at : at + 64].astype(np.int32) @ codes.astype(np.int32)
        score = fma(F(d) * kscale[:, g].astype(F), isum.astype(F), score)
    score = score * F(scale)
    all_m, all_den, total = F(-np.inf), F(0), np.zeros(hd, F)
    for span in range(0, npos, 512):
        m, den, acc = F(-np.inf), F(0), np.zeros(hd, F)
        for b in range(span, min(span + 512, npos), 64):
            block = slice(b, min(b + 64, npos))
            bm = score[block].max()
            p = exp(score[block] - bm)
            out = np.concatenate([weigh(p, values[block, c : c + 64], vscale[block, g]) for g, c in enumerate(groups)])
            m, den, acc = fold(m, den, acc, bm, strided(p, None), out)
        all_m, all_den, total = fold(all_m, all_den, total, m, den, acc)
    return total * (F(1) / all_den)


def weigh(p: Floats, values: Ints, vscale: Ints) -> Floats:
    """Weighted values of one block and value group, by 15-bit weights."""
    w = p * vscale.astype(F)
    big = w.max()
    if not big >= TINY:
        return np.zeros(values.shape[1], F)
    u = np.rint(w * (F(32767) / big)).astype(np.int32)
    return np.asarray((big * (F(1) / F(32767))) * (u @ values.astype(np.int32)).astype(F), F)
