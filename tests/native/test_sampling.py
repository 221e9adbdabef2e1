"""Sampling against its definition (native/src/sampling.h), written here a second time: sort everything, then walk.

Equality is exact: the same id for every draw, the same error, the same bits of log-probabilities.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal, getcontext, localcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata_native import ffi, lib

from tests.native.test_philox import plain_philox

Floats = npt.NDArray[np.float32]
F = np.float32
INF = float("inf")
NAN = float("nan")
quick = settings(deadline=None, max_examples=150)


@dataclass(frozen=True)
class Params:
    """One request's parameters; the defaults are the engine's (greedy)."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    penalty_repeat: float = 1.0
    penalty_freq: float = 0.0
    penalty_present: float = 0.0
    penalty_last_n: int = -1
    seed: int = 0
    choice: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    mask: frozenset[int] | None = None  # allowed ids


@dataclass
class Row:
    """One step: raw logits and the ids before it."""

    logits: Floats
    ids: list[int] = field(default_factory=list)
    n_prompt: int = 0


class Failed(Exception):
    """A failure by its name."""


# ---- the engine ------------------------------------------------------------------------------------------------------


def c_params(p: Params, n_vocab: int) -> tuple[Any, list[Any]]:
    """The C struct and what it points to."""
    sp = ffi.new("st_sampling *")
    lib.st_sampling_init(sp)
    plain = ("temperature", "top_p", "min_p", "top_k", "seed", "choice")
    for name in (*plain, "penalty_repeat", "penalty_freq", "penalty_present", "penalty_last_n"):
        setattr(sp, name, getattr(p, name))
    ids = ffi.new("int32_t[]", [i for i, _ in p.bias])
    values = ffi.new("float[]", [v for _, v in p.bias])
    words = ffi.new("uint32_t[]", (n_vocab + 31) // 32)
    sp.n_bias, sp.bias_ids, sp.bias_values = len(p.bias), ids, values
    if p.mask is not None:
        for i in p.mask:
            words[i // 32] |= 1 << i % 32
        sp.mask = words
    return sp, [ids, values, words]


def call(function: Any, *args: Any) -> int:
    err = ffi.new("st_error *")
    result: int = function(*args, err)
    if result < 0:
        raise Failed(ffi.string(err.name).decode())
    return result


class Sampler:
    """st_sampler for one vocabulary."""

    def __init__(self, n_vocab: int) -> None:
        out = ffi.new("st_sampler **")
        call(lib.st_sampler_new, n_vocab, out)
        self.handle = ffi.gc(out[0], lib.st_sampler_free)
        self.n_vocab = n_vocab

    def sample(self, row: Row, p: Params, position: int | None = None) -> int:
        assert len(row.logits) == self.n_vocab
        sp, keep = c_params(p, self.n_vocab)
        pen = Penalty(self.n_vocab, p)
        pen.reset(row.ids, row.n_prompt)
        return self.draw(row.logits, sp, pen, len(row.ids) if position is None else position, keep)

    def draw(self, logits: Floats, sp: Any, pen: Penalty | None, position: int, _keep: Any = None) -> int:
        token = ffi.new("int32_t *")
        before = logits.tobytes()
        raw = ffi.cast("const float *", ffi.from_buffer(logits))
        try:
            call(lib.st_sample, self.handle, raw, sp, pen.handle if pen else ffi.NULL, position, token)
        finally:
            assert logits.tobytes() == before, "the raw logits were changed"
        return int(token[0])

    def logprobs(self, logits: Floats, token: int, top_n: int) -> tuple[float, list[tuple[int, float]]]:
        lp, ids, lps = ffi.new("double *"), ffi.new("int32_t[1024]"), ffi.new("double[1024]")
        raw = ffi.cast("const float *", ffi.from_buffer(logits))
        n = call(lib.st_logprobs, self.handle, raw, token, top_n, lp, ids, lps)
        return lp[0], [(ids[i], lps[i]) for i in range(n)]


class Penalty:
    """st_penalty of one session."""

    def __init__(self, n_vocab: int, p: Params) -> None:
        out = ffi.new("st_penalty **")
        call(lib.st_penalty_new, n_vocab, c_params(p, n_vocab)[0], out)
        self.handle = ffi.gc(out[0], lib.st_penalty_free)

    def reset(self, ids: list[int], n_prompt: int) -> None:
        call(lib.st_penalty_reset, self.handle, ffi.new("int32_t[]", ids), len(ids), n_prompt)

    def push(self, ids: list[int]) -> None:
        call(lib.st_penalty_push, self.handle, ffi.new("int32_t[]", ids), len(ids))

    def counts(self, ids: set[int]) -> dict[int, tuple[int, int]]:
        window, output = ffi.new("uint32_t *"), ffi.new("uint32_t *")
        found = {}
        for i in ids:
            lib.st_penalty_get(self.handle, i, window, output)
            if window[0] or output[0]:
                found[i] = (window[0], output[0])
        assert lib.st_penalty_size(self.handle) == len(found)
        return found


samplers: dict[int, Sampler] = {}


def sampler_for(n_vocab: int) -> Sampler:
    return samplers.setdefault(n_vocab, Sampler(n_vocab))


def engine(row: Row, p: Params, position: int | None = None) -> int | str:
    try:
        return sampler_for(len(row.logits)).sample(row, p, position)
    except Failed as failure:
        return str(failure)


# ---- the definition, plainly -----------------------------------------------------------------------------------------


def exp_sub(x: Floats, m: np.float32, scale: np.float32) -> Floats:
    x = np.ascontiguousarray(x, dtype=F)
    y = np.empty_like(x)
    source, target = (ffi.cast("float *", ffi.from_buffer(a)) for a in (x, y))
    lib.st_exp_sub(source, len(x), float(m), float(scale), target)
    return y


def ordered_sum(x: Floats) -> float:
    """Rule 5: chunks of 4,096, 32 strided partial sums, halving tree, chunks in order; all in float."""
    total = F(0)
    for c in range(0, len(x), 4096):
        chunk = x[c : c + 4096]
        part = np.zeros(32, F)
        for i in range(0, len(chunk), 32):
            part[: len(chunk[i : i + 32])] += chunk[i : i + 32]
        for w in (16, 8, 4, 2, 1):
            part = part[:w] + part[w : 2 * w]
        total = F(total + part[0])
    return float(total)


def penalty_counts(ids: list[int], n_prompt: int, p: Params) -> tuple[Counter[int], Counter[int]]:
    window = ids if p.penalty_last_n < 0 else ids[max(0, len(ids) - p.penalty_last_n) :]
    return Counter(window), Counter(ids[n_prompt:])


def adjusted(row: Row, p: Params) -> Floats:
    """Steps 0 to 3; excluded tokens are -infinity."""
    out = row.logits.copy()
    if not np.isfinite(out).all():
        raise Failed("non_finite")
    window, output = penalty_counts(row.ids, row.n_prompt, p)
    with np.errstate(over="ignore"):
        if p.penalty_repeat != 1:
            for i in window:
                out[i] = out[i] / F(p.penalty_repeat) if out[i] > 0 else out[i] * F(p.penalty_repeat)
        for i, count in output.items():
            out[i] -= F(count) * F(p.penalty_freq) + F(p.penalty_present)
        if not np.isfinite(out).all():
            raise Failed("non_finite")
        for i, bias in p.bias:
            if out[i] == -INF or bias == -INF:
                out[i] = -INF
                continue
            out[i] += F(bias)
            if not np.isfinite(out[i]):
                raise Failed("non_finite")
    if p.mask is not None:
        out[[i for i in range(len(out)) if i not in p.mask]] = -INF
    return out


def naive(row: Row, p: Params, position: int | None = None) -> int | str:
    """The id, or the name of the failure."""
    try:
        logits = adjusted(row, p)
    except Failed as failure:
        return str(failure)
    order = [i for i in np.lexsort((np.arange(len(logits)), -logits)).tolist() if logits[i] > -INF]
    if not order:
        return "no_candidates"
    if p.temperature <= 0 or p.top_k == 1:
        return int(order[0])
    m = logits[order[0]]
    with np.errstate(over="ignore", divide="ignore"):
        scale = min(F(1) / F(p.temperature), np.finfo(F).max)
    everything = len(order)
    cut_k = 0 < p.top_k < len(logits)
    if cut_k:
        order = order[: p.top_k]
    probs = exp_sub(logits[order], m, F(1)).astype(np.float64)
    goal = INF
    if F(p.top_p) < 1:
        z1 = sum_in_order(probs.tolist()) if cut_k else ordered_sum(exp_sub(logits, m, F(1)))
        goal = float(F(p.top_p)) * z1
    kept, total = 0, 0.0
    for prob in probs.tolist():
        if kept and (prob < float(F(p.min_p)) or total >= goal):
            break
        total += prob
        kept += 1
    order = order[:kept]
    weights = exp_sub(logits[order], m, scale).astype(np.float64).tolist()
    uncut = not cut_k and F(p.top_p) >= 1 and F(p.min_p) <= 0
    assert not uncut or kept == everything
    z2 = ordered_sum(exp_sub(logits, m, scale)) if uncut else sum_in_order(weights)
    at = len(row.ids) if position is None else position
    word = plain_philox([at, 0, p.choice, 0], [p.seed & 0xFFFFFFFF, p.seed >> 32])[0]
    total, last = 0.0, order[0]
    for token, weight in zip(order, weights, strict=True):
        total += weight
        if weight > 0:
            last = token
        if total > word * 2.0**-32 * z2:
            break
    return int(last)


def sum_in_order(values: list[float]) -> float:
    """Plain left-to-right double sum (the built-in sum compensates from Python 3.12 on)."""
    total = 0.0
    for v in values:
        total += v
    return total


# ---- rows and parameters ---------------------------------------------------------------------------------------------


def make_logits(kind: str, n: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n)
    kinds: dict[str, Callable[[], Any]] = {
        "peaked": lambda: np.where(rng.random(n) < 0.02, x + 12, x * 2),
        "normal": lambda: x * 2.5,
        "flat": lambda: x * 0.1,
        "ties": lambda: np.round(x),
        "zeros": lambda: np.where(x > 0, 0.0, -0.0),
        "wide": lambda: x * 60,
        "huge": lambda: x * 1e37,
        "denormal": lambda: x * 1e-42,
        "falling": lambda: -np.arange(n) * 0.01,
        "rising": lambda: np.arange(n) * 0.01,
    }
    out: Floats = kinds[kind]().astype(F)
    return out


KINDS = ["peaked", "normal", "flat", "ties", "zeros", "wide", "huge", "denormal", "falling", "rising"]
SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 128, 1000, 4096, 4097, 9000]
percent = st.floats(0, 1, width=32)
seeds = st.integers(0, 2**64 - 1)


@st.composite
def rows(draw: Any, sizes: list[int] = SIZES) -> Row:
    n = draw(st.sampled_from(sizes))
    logits = make_logits(draw(st.sampled_from(KINDS)), n, draw(st.integers(0, 2**32 - 1)))
    ids = draw(st.lists(st.integers(0, min(n - 1, 40)), max_size=30))
    return Row(logits, ids, draw(st.integers(0, len(ids))))


@st.composite
def params(draw: Any, n: int = 1) -> Params:
    def sometimes(strategy: Any, off: Any) -> Any:
        return draw(strategy) if draw(st.booleans()) else off

    token = st.integers(0, n - 1)
    bias = st.one_of(st.sampled_from([-100.0, 100.0, -INF, 0.0]), st.floats(-20, 20, width=32))
    tiny = 2.0**-149
    temperature = st.one_of(st.sampled_from([0.0, -1.0, tiny, 1e-3, 0.7, 1.0, 3.0, 1e38]), st.floats(0.25, 4, width=32))
    mask = sometimes(st.sampled_from([2, 3, 50]), 0)
    start = draw(token)
    return Params(
        temperature=draw(temperature),
        top_p=sometimes(st.one_of(percent, st.sampled_from([0.5, 0.9, 0.95, 1e-6])), 1.0),
        min_p=sometimes(st.one_of(percent, st.sampled_from([0.05, 1.0])), 0.0),
        top_k=sometimes(st.one_of(st.integers(1, 80), st.integers(1, n + 1)), 0),
        penalty_repeat=sometimes(st.floats(0.5, 2, width=32), 1.0),
        penalty_freq=sometimes(st.floats(-2, 2, width=32), 0.0),
        penalty_present=sometimes(st.floats(-2, 2, width=32), 0.0),
        penalty_last_n=draw(st.sampled_from([-1, 0, 1, 5, 64])),
        seed=draw(seeds),
        choice=draw(st.integers(0, 2**32 - 1)),
        bias=tuple(draw(st.lists(st.tuples(token, bias), max_size=4))) if draw(st.booleans()) else (),
        mask=frozenset(range(start, n, mask)) if mask else None,
    )


# ---- equality with the definition ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_equals_the_definition(data: st.DataObject) -> None:
    row = data.draw(rows())
    p = data.draw(params(len(row.logits)))
    assert engine(row, p) == naive(row, p)


@pytest.mark.parametrize("isa", [b"scalar", b"avx2", b"avx512"])
def test_every_instruction_set_draws_the_same(isa: bytes) -> None:
    kernels = lib.st_kernels_find(isa, ffi.NULL)
    if not kernels:
        pytest.skip(f"this processor has no {isa.decode()}")
    sampler = Sampler(9001)
    lib.st_sampler_set_exp(sampler.handle, kernels.exp_sub)
    for kind in KINDS:
        row = Row(make_logits(kind, 9001, 4))
        for p in (Params(temperature=0.7, top_p=0.9), Params(temperature=3.0), Params(temperature=1.0, top_k=50)):
            assert [sampler.sample(row, p, i) for i in range(8)] == [engine(row, p, i) for i in range(8)]
        assert sampler.logprobs(row.logits, 77, 20) == sampler_for(9001).logprobs(row.logits, 77, 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "p",
    [
        Params(temperature=0.7, top_p=0.95),
        Params(temperature=1.0),
        Params(temperature=4.0),
        Params(temperature=1.0, top_k=700),
        Params(temperature=1.5, min_p=0.01, top_p=0.999),
    ],
    ids=["top_p", "plain", "hot", "top_k", "min_p"],
)
def test_equals_the_definition_in_a_large_vocabulary(kind: str, p: Params) -> None:
    """Deep walks: the sorted prefix grows through every one of its stages."""
    row = Row(make_logits(kind, 40_000, 11))
    for seed in (1, 2**63):
        assert engine(row, replace(p, seed=seed)) == naive(row, replace(p, seed=seed))


@quick
@given(row=rows(), temperature=st.sampled_from([0.0, -3.0]))
def test_greedy_takes_the_lowest_of_the_largest(row: Row, temperature: float) -> None:
    assert engine(row, Params(temperature=temperature)) == int(np.argmax(row.logits))


@quick
@given(row=rows(), seed=seeds, temperature=st.sampled_from([0.5, 1.0, 1e30]))
def test_top_k_1_and_tiny_top_p_and_a_cold_draw_are_greedy(row: Row, seed: int, temperature: float) -> None:
    greedy = engine(row, Params())
    assert engine(row, Params(temperature=temperature, seed=seed, top_k=1)) == greedy
    assert engine(row, Params(temperature=temperature, seed=seed, top_p=0.0)) == greedy
    assert engine(row, Params(temperature=temperature, seed=seed, top_p=1e-9)) == greedy
    top = np.sort(row.logits)[::-1]
    if len(top) == 1 or top[0] - top[1] > 1e-3:
        assert engine(row, Params(temperature=1e-9, seed=seed)) == greedy


@quick
@given(row=rows(), seed=seeds)
def test_min_p_1_draws_among_the_largest(row: Row, seed: int) -> None:
    got = engine(row, Params(temperature=1.0, seed=seed, min_p=1.0))
    assert isinstance(got, int)
    assert exp_sub(row.logits[got : got + 1], row.logits.max(), F(1))[0] == 1


def test_a_hot_draw_is_uniform_even_where_probabilities_vanish() -> None:
    """At temperature 3e38 all weights are 1: a token with p = 0 at temperature 1 is as likely as any."""
    row = Row(np.array([0, -500, -1000, -2000], F))
    drawn = Counter(engine(row, Params(temperature=3e38, seed=5), position) for position in range(4000))
    assert set(drawn) == {0, 1, 2, 3}
    assert all(abs(drawn[i] - 1000) < 150 for i in range(4))


def test_a_vocabulary_of_one() -> None:
    row = Row(np.array([-7], F))
    for p in (Params(), Params(temperature=1.0), Params(temperature=1.0, top_p=0.5, min_p=1.0, top_k=3)):
        assert engine(row, p) == 0


def test_no_token_of_weight_zero_is_drawn() -> None:
    """Whatever rounding does at the end of the walk, an excluded or vanished token is never the last resort."""
    logits = np.full(5000, -1e4, F)
    logits[[7, 4000]] = 3
    for p in (Params(temperature=1.0), Params(temperature=1.0, top_p=0.999999), Params(temperature=1.0, min_p=1e-30)):
        assert {engine(Row(logits), replace(p, seed=s)) for s in range(200)} == {7, 4000}


def test_the_same_call_gives_the_same_token_whatever_came_before() -> None:
    p = Params(temperature=0.9, top_p=0.9, seed=77)
    row = Row(make_logits("normal", 9000, 1), [3, 4], 1)
    first = [engine(row, p, position) for position in range(50)]
    for other in (Params(), Params(temperature=5.0, bias=((3, 9.0),)), Params(temperature=1.0, mask=frozenset({1}))):
        engine(row, other)
    fresh = Sampler(9000)
    assert [fresh.sample(row, p, position) for position in range(50)] == first
    assert len(set(first)) > 5


def test_the_edges_of_top_p_and_min_p_belong_to_what_is_kept() -> None:
    """Equal logits make every sum exact: top_p 1/2 of four tokens is two; min_p equal to a probability keeps it."""
    drawn = {engine(Row(np.zeros(4, F)), Params(temperature=1.0, top_p=0.5, seed=s)) for s in range(60)}
    assert drawn == {0, 1}
    logits = np.array([0, -0.5, -0.6], F)
    edge = float(exp_sub(logits[1:2], F(0), F(1))[0])
    for min_p, kept in ((edge, {0, 1}), (math.nextafter(edge, 1) + 1e-7, {0})):
        assert {engine(Row(logits), Params(temperature=5.0, min_p=min_p, seed=s)) for s in range(60)} == kept


def test_the_draw_takes_the_token_above_the_threshold() -> None:
    """Seed 1364629 draws u = 0x0f600000 / 2^32 at position 0: exactly the sum of the first 246 of 4,096 equals."""
    assert plain_philox([0, 0, 0, 0], [1364629, 0])[0] == 0x0F600000
    assert engine(Row(np.zeros(4096, F)), Params(temperature=1.0, seed=1364629)) == 246


# Seeds whose number at position 0 is all but 1: 1 - u is 1.8e-8, 4.5e-8 and 4.4e-8.
HIGH_SEEDS = [16390493, 28454778, 34531142]


@pytest.mark.parametrize("seed", HIGH_SEEDS)
def test_when_rounding_leaves_none_the_last_token_of_weight_is_drawn(seed: int) -> None:
    assert plain_philox([0, 0, 0, 0], [seed, 0])[0] >= 0xFFFFFF00
    beyond = 0
    for trial in range(40):
        logits = make_logits("flat", 3000, trial)
        logits[2500:] = -200  # weight 0 at temperature 1
        row, p = Row(logits), Params(temperature=1.0, seed=seed)
        assert engine(row, p) == naive(row, p)
        assert logits[int(engine(row, p))] > -200
        weights = exp_sub(logits, logits.max(), F(1))
        beyond += sum_in_order(weights.tolist()) <= ordered_sum(weights) * (1 - 2e-8)
    assert beyond > 5  # the case was really there


@pytest.mark.parametrize("seed", HIGH_SEEDS)
@pytest.mark.parametrize("top_k", [0, 4999, 5000, 5001])
def test_the_order_of_the_denominator_is_as_stated(seed: int, top_k: int) -> None:
    """Far out in the tail, single ids tell one order of summing from another."""
    for trial in range(8):
        logits = make_logits("flat", 5000, trial)
        logits[500:] -= 20
        row, p = Row(logits), Params(temperature=1.0, top_k=top_k, seed=seed)
        assert engine(row, p) == naive(row, p)


# ---- distribution ----------------------------------------------------------------------------------------------------


def chi_square(drawn: Counter[int], expected: Floats, n: int) -> float:
    return float(sum((drawn[i] - n * e) ** 2 / (n * e) for i, e in enumerate(expected.tolist()) if e > 0))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vary", ["position", "seed", "choice"])
def test_draws_follow_the_softmax(temperature: float, vary: str) -> None:
    """Chi-square with 7 degrees of freedom: 29.9 is the 0.9999 quantile; the seeds are fixed."""
    logits = np.array([1.5, 0, -1, 2, 0.25, -0.5, 1, 0.75], F)
    expected = np.exp(logits.astype(np.float64) / temperature)
    expected /= expected.sum()
    sampler, n, drawn = sampler_for(8), 8000, Counter[int]()
    sp, keep = c_params(Params(temperature=temperature, seed=4242), 8)
    for i in range(n):
        if vary != "position":
            setattr(sp, vary, i)
        drawn[sampler.draw(logits, sp, None, i if vary == "position" else 9, keep)] += 1
    assert chi_square(drawn, expected, n) < 29.9


def test_filters_renormalise_what_they_keep() -> None:
    """top_p 0.7 of (0.5, 0.3, 0.2) keeps two tokens at 5 : 3, and temperature applies to them afterwards."""
    logits = np.log(np.array([0.3, 0.5, 0.2])).astype(F)
    for temperature in (1.0, 2.0):
        weights = np.array([0.3, 0.5, 0.0]) ** (1 / temperature)
        p = Params(temperature=temperature, top_p=0.7, seed=3)
        drawn = Counter(int(engine(Row(logits), p, i)) for i in range(6000))
        assert drawn[2] == 0
        assert chi_square(drawn, weights / weights.sum(), 6000) < 15.2


# ---- penalties, bias, mask -------------------------------------------------------------------------------------------


def test_the_repeat_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    row = Row(np.array([4, 3.9, -1, -1.1], F), [0, 0, 0], 2)
    assert engine(row, Params(penalty_repeat=1.02)) == 0  # once per id, not once per occurrence
    assert engine(row, Params(penalty_repeat=1.1)) == 1
    row = Row(np.array([-1, -1.1], F), [0], 1)
    assert engine(row, Params(penalty_repeat=1.2)) == 1
    assert engine(row, Params(penalty_repeat=1.2, penalty_last_n=0)) == 0


def test_the_repeat_window_covers_the_last_ids_of_prompt_and_output() -> None:
    for n_prompt in (0, 2, 3):
        row = Row(np.array([4, 3, 2], F), [1, 0, 2], n_prompt)
        got = {n: engine(row, Params(penalty_repeat=3, penalty_last_n=n)) for n in (0, 1, 2, 3, 99, -1)}
        assert got == {0: 0, 1: 0, 2: 1, 3: 0, 99: 0, -1: 0}


def test_frequency_and_presence_count_the_whole_output_and_no_prompt() -> None:
    logits = np.array([2, 1.5, 0], F)
    for n_prompt, output in ((3, []), (0, [0, 0, 0])):
        row = Row(logits, [0, 0, 0], n_prompt)
        assert engine(row, Params(penalty_freq=1.0)) == (1 if output else 0)
        assert engine(row, Params(penalty_present=0.6)) == (1 if output else 0)
    for window in (-1, 0, 1, 64):
        assert engine(Row(logits, [0, 0, 1], 0), Params(penalty_freq=0.6, penalty_last_n=window)) == 1  # 0.8 and 0.9
        assert engine(Row(logits, [0, 0, 1], 0), Params(penalty_freq=0.4, penalty_last_n=window)) == 0  # 1.2 and 1.1
        assert engine(Row(logits, [0, 0], 0), Params(penalty_present=0.4, penalty_last_n=window)) == 0  # 1.6, not 1.2


@quick
@given(data=st.data())
def test_counts_kept_id_by_id_equal_counts_made_anew(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([1, 5, 300]))
    p = data.draw(params(n))
    ids = data.draw(st.lists(st.integers(0, n - 1), max_size=60))
    n_prompt = data.draw(st.integers(0, len(ids)))
    pushed, anew = Penalty(n, p), Penalty(n, p)
    pushed.reset(ids[:n_prompt], n_prompt)
    for end in range(n_prompt, len(ids) + 1):
        if end > n_prompt:
            pushed.push(ids[:end])
        anew.reset(ids[:end], n_prompt)
        window, output = penalty_counts(ids[:end], n_prompt, p)
        if p.penalty_repeat == 1:
            window.clear()
        if p.penalty_freq == 0 and p.penalty_present == 0:
            output.clear()
        expected = {i: (window[i], output[i]) for i in {*window, *output}}
        assert pushed.counts(set(ids)) == anew.counts(set(ids)) == expected


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, -1])
def test_long_histories_of_few_ids_keep_their_counts(window: int) -> None:
    p = Params(penalty_repeat=1.5, penalty_last_n=window)
    ids = np.random.default_rng(window + 1).integers(0, 6, 400).tolist()
    pen = Penalty(6, p)
    for end in range(1, len(ids) + 1):
        pen.push(ids[:end])
        expected = penalty_counts(ids[:end], end, p)[0]
        assert pen.counts(set(range(6))) == {i: (n, 0) for i, n in expected.items()}


def test_a_chain_of_draws_with_kept_counts_equals_the_definition() -> None:
    """Eighty tokens one after another, as a request makes them."""
    n = 400
    p = Params(0.8, 0.95, penalty_repeat=1.2, penalty_freq=0.3, penalty_present=0.2, penalty_last_n=16, seed=9)
    ids, n_prompt = [5, 9, 9, 2], 4
    sampler, pen = sampler_for(n), Penalty(n, p)
    sp, keep = c_params(p, n)
    pen.reset(ids, n_prompt)
    for step in range(80):
        logits = make_logits("peaked", n, step)
        token = sampler.draw(logits, sp, pen, len(ids), keep)
        assert token == naive(Row(logits, ids, n_prompt), p)
        ids.append(token)
        pen.push(ids)


def test_bias_lifts_sinks_and_excludes() -> None:
    row = Row(np.array([3, 2, 1], F))
    assert engine(row, Params(bias=((2, 100.0),))) == 2
    assert engine(row, Params(bias=((0, -100.0),))) == 1
    assert engine(row, Params(bias=((0, -INF), (0, 100.0)))) == 1
    assert engine(row, Params(bias=((2, 1.0), (2, 1.5)))) == 2  # added in order
    drawn = {engine(row, Params(temperature=50.0, bias=((1, -INF),), seed=s)) for s in range(60)}
    assert drawn == {0, 2}


def test_the_mask_limits_the_choice_and_bits_past_the_end_do_not_matter() -> None:
    row = Row(make_logits("normal", 70, 3))
    for allowed in (frozenset({69}), frozenset({0}), frozenset({31, 32, 63, 64}), frozenset(range(70))):
        best = max(sorted(allowed), key=lambda i: row.logits[i])
        assert engine(row, Params(mask=allowed)) == best
        drawn = {engine(row, Params(temperature=20.0, mask=allowed, seed=s)) for s in range(300)}
        assert drawn <= allowed and (len(allowed) > 4 or drawn == allowed)
    sp, keep = c_params(Params(mask=frozenset({4})), 70)
    sp.mask[2] = 0xFFFFFFC0 & ~0x3F  # ids 64..69 clear, the rest of the word set
    assert sampler_for(70).draw(row.logits, sp, None, 0, keep) == 4


def test_nothing_left_is_an_error() -> None:
    row = Row(make_logits("normal", 70, 3))
    for temperature in (0.0, 1.0):
        assert engine(row, Params(temperature=temperature, mask=frozenset())) == "no_candidates"
        only = Params(temperature=temperature, mask=frozenset({5}), bias=((5, -INF),))
        assert engine(row, only) == "no_candidates"


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("n", [1, 64, 1000])
@pytest.mark.parametrize("p", [Params(), Params(temperature=1.0), Params(mask=frozenset({0}), penalty_repeat=1.1)])
def test_logits_that_are_not_finite_are_an_error(bad: float, n: int, p: Params) -> None:
    for at in {0, n // 2, n - 1}:
        logits = make_logits("normal", n, 1)
        logits[at] = bad
        assert engine(Row(logits), p) == "non_finite"
        with pytest.raises(Failed, match="non_finite"):
            sampler_for(n).logprobs(logits, 0, 1)


def test_an_adjustment_that_overflows_is_an_error() -> None:
    row = Row(np.array([-3e38, 3e38, 0], F), [0], 1)
    assert engine(row, Params(penalty_repeat=2.0)) == "non_finite"
    assert engine(row, Params(bias=((1, 3e38),))) == "non_finite"
    assert engine(row, Params(temperature=1.0)) == 1


def test_a_penalty_without_counts_is_refused() -> None:
    sp, keep = c_params(Params(penalty_repeat=1.5), 4)
    with pytest.raises(Failed, match="internal"):
        sampler_for(4).draw(np.zeros(4, F), sp, None, 0, keep)


def test_ids_outside_the_vocabulary_are_refused_by_the_counts() -> None:
    pen = Penalty(4, Params(penalty_repeat=2.0, penalty_last_n=2))
    for ids in ([4], [0, -1]):
        with pytest.raises(Failed, match="token_range"):
            pen.reset(ids, 0)
    pen.reset([], 0)
    with pytest.raises(Failed, match="internal"):
        pen.push([1, 2, 3])  # ids 0 and 1 were never counted


# ---- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [NAN, INF, -INF]),
        ("top_p", [NAN, -0.1, 1.01, INF]),
        ("min_p", [NAN, -0.1, 1.01]),
        ("penalty_repeat", [NAN, 0.0, -1.0, INF, 101.0]),
        ("penalty_freq", [NAN, INF, 100.5, -101.0]),
        ("penalty_present", [NAN, -INF, 100.5]),
        ("top_k", [-1]),
        ("penalty_last_n", [-2]),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(name: str, values: list[float]) -> None:
    for value in values:
        changed: dict[str, Any] = {name: value}
        sp, _keep = c_params(replace(Params(), **changed), 10)
        err = ffi.new("st_error *")
        assert lib.st_sampling_check(sp, 10, err) == -1
        assert ffi.string(err.name) == b"bad_key"
        assert ffi.string(err.text).decode().startswith(f"{name} must be")


def test_bias_is_checked() -> None:
    for pair, name in [
        ((10, 1.0), "token_range"),
        ((-1, 1.0), "token_range"),
        ((3, NAN), "bad_key"),
        ((3, INF), "bad_key"),
    ]:
        sp, _keep = c_params(Params(bias=((2, 1.0), pair)), 10)
        with pytest.raises(Failed, match=name):
            call(lib.st_sampling_check, sp, 10)
    sp, _keep = c_params(Params(bias=((9, -INF), (0, -100.0))), 10)
    assert call(lib.st_sampling_check, sp, 10) == 0


@quick
@given(p=params(50))
def test_what_the_tests_draw_passes_the_check(p: Params) -> None:
    sp, _keep = c_params(p, 50)
    assert call(lib.st_sampling_check, sp, 50) == 0


@pytest.mark.parametrize("n", [0, -1, 2**30])
def test_a_vocabulary_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(Failed, match="bad_range"):
        call(lib.st_sampler_new, n, ffi.new("st_sampler **"))
    with pytest.raises(Failed, match="bad_range"):
        call(lib.st_penalty_new, n, c_params(Params(), 1)[0], ffi.new("st_penalty **"))


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def math_d(op: int, a: list[float], b: list[float] | None = None) -> list[float]:
    y = ffi.new("double[]", len(a))
    call(lib.st_math_d, op, ffi.new("double[]", a), ffi.new("double[]", b) if b else ffi.NULL, len(a), y)
    return list(y)


@quick
@given(row=rows(), top_n=st.sampled_from([0, 1, 5, 20, 1024]), data=st.data())
def test_logprobs_are_the_log_softmax_of_the_raw_logits(row: Row, top_n: int, data: st.DataObject) -> None:
    logits, n = row.logits, len(row.logits)
    token = data.draw(st.integers(0, n - 1))
    logprob, top = sampler_for(n).logprobs(logits, token, top_n)
    m = logits.max()
    (log_z,) = math_d(lib.ST_MATH_LOG, [ordered_sum(exp_sub(logits, m, F(1)))])
    order = np.lexsort((np.arange(n), -logits)).tolist()[:top_n]
    assert top == [(i, (float(logits[i]) - float(m)) - log_z) for i in order]
    assert logprob == (float(logits[token]) - float(m)) - log_z
    wide = logits.astype(np.float64) - float(m)
    assert logprob == pytest.approx(wide[token] - math.log(np.exp(wide).sum()), rel=1e-6, abs=1e-5)


def test_logprobs_bounds() -> None:
    logits = np.zeros(10, F)
    sampler = sampler_for(10)
    for token, top_n, name in [(10, 1, "token_range"), (-1, 1, "token_range"), (0, -1, "bad_range"), (0, 1025, "bad_")]:
        with pytest.raises(Failed, match=name):
            sampler.logprobs(logits, token, top_n)
    assert [i for i, _ in sampler.logprobs(logits, 0, 20)[1]] == list(range(10))


# ---- functions in double ---------------------------------------------------------------------------------------------

getcontext().prec = 60
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")


def exact_sin(x: Decimal) -> Decimal:
    with localcontext() as c:
        c.prec = 90
        x = x.remainder_near(2 * PI)
        total = term = x
        k = 1
        while abs(term) > Decimal(10) ** -60:
            term *= -x * x / ((k + 1) * (k + 2))
            total += term
            k += 2
        return total


def ulps(got: float, exact: Decimal) -> float:
    return float(abs(Decimal(got) - exact) / Decimal(math.ulp(float(exact))))


def test_exp_d_is_within_one_ulp() -> None:
    x = [*np.random.default_rng(1).uniform(-708, 709, 600).tolist(), 0.0, 1e-17, -1e-9, 0.34657, -0.34658, 709.78]
    assert all(ulps(y, Decimal(a).exp()) < 1 for a, y in zip(x, math_d(lib.ST_MATH_EXP, x), strict=True))
    assert math_d(lib.ST_MATH_EXP, [709.79, INF, -INF, -746.0, 0.0, -0.0]) == [INF, INF, 0, 0, 1, 1]
    assert math_d(lib.ST_MATH_EXP, [-745.0])[0] == 5e-324
    assert math.isnan(math_d(lib.ST_MATH_EXP, [NAN])[0])


def test_log_d_is_within_one_ulp() -> None:
    rng = np.random.default_rng(2)
    edges = [5e-324, 1e-310, 1.7e308, 1 + 2**-52, 1 - 2**-53]
    x = [*np.exp(rng.uniform(-700, 700, 300)), *rng.uniform(0.5, 2, 300), *edges]
    assert all(ulps(y, Decimal(float(a)).ln()) < 1 for a, y in zip(x, math_d(lib.ST_MATH_LOG, x), strict=True))
    assert math_d(lib.ST_MATH_LOG, [1.0, 0.0, INF]) == [0, -INF, INF]
    assert all(math.isnan(y) for y in math_d(lib.ST_MATH_LOG, [-1.0, NAN, -INF]))


def test_sincos_d_is_within_one_ulp_to_ten_million() -> None:
    rng = np.random.default_rng(3)
    near = [float(n * PI / 2) for n in (1, 2, 3, 355, 552047, 3713459, 6138551)]  # where most digits cancel
    x = [*rng.uniform(-1e7, 1e7, 200), *rng.uniform(-10, 10, 200), *near, *(-a for a in near), 0.0, 1e-300, 262144.0]
    sines, cosines = math_d(lib.ST_MATH_SIN, x), math_d(lib.ST_MATH_COS, x)
    for a, s, c in zip(x, sines, cosines, strict=True):
        assert ulps(s, exact_sin(Decimal(float(a)))) < 1
        assert ulps(c, exact_sin(Decimal(float(a)) + PI / 2)) < 1
    for op in (lib.ST_MATH_SIN, lib.ST_MATH_COS):
        assert all(math.isnan(y) for y in math_d(op, [1.1e7, -INF, NAN]))


def test_pow_d_makes_rope_frequencies() -> None:
    base, dim = 1e7, 128
    powers = [-2 * i / dim for i in range(dim // 2)]
    for p, y in zip(powers, math_d(lib.ST_MATH_POW, [base] * len(powers), powers), strict=True):
        exact = (Decimal(base).ln() * Decimal(p)).exp()
        assert abs(Decimal(y) - exact) / exact <= Decimal(2) ** -53 * Decimal(3 + 2 * abs(p * math.log(base)))
    with pytest.raises(Failed, match="bad_range"):
        math_d(9, [1.0])
