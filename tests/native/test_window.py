"""What goes into the next window: the policy by itself, and whole days of it simulated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata_native import ffi, lib


def pace(max_rows: int = 512, stall: float = 250.0, share: float = 0.5, rate: float = 0.0, debt: float = 0.0) -> Any:
    p = ffi.new("st_pace *")
    lib.st_pace_init(p, max_rows, stall, share)
    p.best_rows_per_ms, p.debt_ms = rate, debt
    return p


def decoding(rows: int = 1) -> dict[str, float]:
    return {"decoding": rows}


def reading(tokens: int, cut: int | None = None, waited: float = 0.0) -> dict[str, float]:
    return {"reading": tokens, "until_cut": tokens if cut is None else cut, "waited_ms": waited}


def plan(p: Any, slots: Sequence[dict[str, float]]) -> list[int]:
    view, rows = ffi.new("st_view[]", list(slots)), ffi.new("int[]", len(slots))
    prompt = lib.st_window_plan(p, view, len(slots), rows)
    assert prompt == sum(rows[i] for i, s in enumerate(slots) if s.get("reading"))
    return list(rows)


# ---- one window ------------------------------------------------------------------------------------------------


def test_alone_a_prompt_gets_the_whole_window() -> None:
    assert plan(pace(), [reading(5000)]) == [512]
    assert plan(pace(), [reading(100)]) == [100]


def test_decoding_slots_all_take_part_and_idle_ones_do_not() -> None:
    assert plan(pace(), [decoding(1), {}, decoding(4)]) == [1, 0, 4]


def test_beside_decoding_slots_prompt_rows_fit_the_stall_target() -> None:
    """At 2 rows a millisecond, 100 ms hold 200 rows, those of the decoding slots among them."""
    assert plan(pace(stall=100, rate=2), [decoding(4), reading(5000)]) == [4, 196]
    assert plan(pace(stall=1000, rate=2), [decoding(4), reading(5000)]) == [4, 512]


@pytest.mark.parametrize("rows", [1, 5, 9, 100])
@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_a_read_goes_on_however_short_the_window_and_however_many_decode(chunk: int, rows: int) -> None:
    got = plan(pace(max_rows=chunk, stall=1, rate=0.001), [decoding(rows), reading(5000)])
    assert got == [rows, min(chunk, 8)]


def test_a_machine_not_yet_known_is_probed_with_a_short_chunk() -> None:
    assert plan(pace(), [decoding(), reading(5000)]) == [1, 32]


def test_a_read_stops_at_its_cut_and_others_use_the_rest() -> None:
    assert plan(pace(), [reading(300, cut=50), reading(1000)]) == [50, 462]


def test_the_shortest_is_read_first() -> None:
    assert plan(pace(), [reading(3000), reading(600), reading(10)]) == [0, 502, 10]


def test_who_has_waited_long_comes_before_who_is_short() -> None:
    assert plan(pace(rate=1), [reading(3000, waited=2500), reading(600)]) == [512, 0]


def test_owed_decode_time_holds_prompts_back_only_while_somebody_decodes() -> None:
    assert plan(pace(rate=2, debt=3.0), [decoding(), reading(50)]) == [1, 0]
    assert plan(pace(rate=2, debt=3.0), [{}, reading(50)]) == [0, 50]


def test_decode_time_is_owed_for_prompt_rows_and_repaid_by_decode_windows() -> None:
    p = pace(share=0.5)
    lib.st_pace_account(p, 100.0, 90, 92, 2)
    assert p.debt_ms == 50
    lib.st_pace_account(p, 30.0, 0, 2, 2)
    assert p.debt_ms == 20
    lib.st_pace_account(p, 30.0, 0, 2, 2)
    assert p.debt_ms == 0
    lib.st_pace_account(p, 100.0, 90, 92, 2)
    lib.st_pace_account(p, 1.0, 0, 1, 0)
    assert p.debt_ms == 0  # nobody decodes any more


def test_the_fastest_rate_is_kept_and_slowly_forgotten() -> None:
    p = pace()
    lib.st_pace_account(p, 100.0, 400, 400, 0)
    lib.st_pace_account(p, 100.0, 10, 10, 1)
    assert 3.99 < p.best_rows_per_ms < 4
    lib.st_pace_account(p, 0.1, 2, 2, 0)  # a handful of rows says nothing
    assert p.best_rows_per_ms < 4
    for _ in range(3000):
        lib.st_pace_account(p, 100.0, 100, 100, 0)
    assert p.best_rows_per_ms == pytest.approx(1.0, rel=0.01)


SLOT: st.SearchStrategy[dict[str, float]] = st.one_of(
    st.just({}),
    st.integers(1, 9).map(decoding),
    st.builds(reading, st.integers(1, 100000), st.integers(0, 100000), st.floats(0, 1e7)),
)


@given(
    st.lists(SLOT, min_size=1, max_size=65),
    st.integers(1, 4000),
    st.floats(1, 1e5),
    st.floats(0, 1e3),
    st.sampled_from([0.0, 5.0]),
)
def test_any_window_is_within_its_bounds(
    slots: list[dict[str, float]], chunk: int, stall: float, rate: float, debt: float
) -> None:
    rows = plan(pace(chunk, stall, 0.5, rate, debt), slots)
    decoders = sum("decoding" in s for s in slots)
    for got, slot in zip(rows, slots, strict=True):
        if "decoding" in slot:
            assert got == slot["decoding"]
        elif "reading" in slot:
            assert 0 <= got <= min(slot["reading"], slot["until_cut"] or 1e9)
        else:
            assert got == 0
    prompt = sum(got for got, slot in zip(rows, slots, strict=True) if "reading" in slot)
    assert prompt <= chunk
    if any("reading" in s for s in slots) and not (decoders and debt):
        assert prompt >= 1


# ---- whole days --------------------------------------------------------------------------------------------------


@dataclass
class Day:
    """A machine that reads `rate` rows a millisecond and needs `decode_ms` for a window that only decodes."""

    pace: Any
    rate: float = 2.0
    decode_ms: float = 5.0
    now: float = 0.0
    left: dict[int, int] = field(default_factory=dict)  # prompt tokens still to read, by request
    since: dict[int, float] = field(default_factory=dict)  # when it had its last rows
    came: dict[int, float] = field(default_factory=dict)
    took: dict[int, float] = field(default_factory=dict)

    def arrive(self, name: int, tokens: int) -> None:
        self.left[name] = tokens
        self.since[name] = self.came[name] = self.now

    def window(self, decoders: int) -> tuple[float, int]:
        """One window; its ms and prompt rows."""
        names = list(self.left)
        slots = [decoding() for _ in range(decoders)]
        slots += [reading(self.left[n], waited=self.now - self.since[n]) for n in names]
        if not slots:
            self.now += 1
            return 0, 0
        rows = plan(self.pace, slots)
        prompt = sum(rows[decoders:])
        ms = self.decode_ms + prompt / self.rate if decoders else prompt / self.rate
        self.now += ms
        lib.st_pace_account(self.pace, ms, prompt, sum(rows), decoders)
        for name, got in zip(names, rows[decoders:], strict=True):
            if got:
                self.left[name] -= got
                self.since[name] = self.now
            if not self.left[name]:
                del self.left[name]
                self.took[name] = self.now - self.came[name]
        return ms, prompt


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0, 2.0])
def test_decoding_gets_its_share_of_the_time(share: float) -> None:
    day = Day(pace(stall=100, share=share))
    day.arrive(0, 20000)
    spent = {True: 0.0, False: 0.0}
    gaps = []
    while day.left:
        ms, prompt = day.window(2)
        spent[prompt > 0] += ms
        gaps.append(ms)
    assert spent[False] >= share * (spent[True] - max(gaps))  # what the last one is owed comes after the end
    assert spent[False] <= share * spent[True] + day.decode_ms * len(gaps)
    assert max(gaps) <= 100 + 2 * day.decode_ms


def test_a_long_prompt_among_ever_new_short_ones_is_read() -> None:
    """Short prompts keep the machine busy nine tenths of the time; the long one would take 5 s alone."""
    rng, day = random.Random(1), Day(pace(stall=250, rate=2.0))
    day.arrive(0, 10000)
    name, due = 0, 0.0
    while 0 in day.left:
        while due <= day.now:
            name += 1
            day.arrive(name, rng.randrange(200, 600))
            due += 222
        day.window(0)
        assert day.now < 120e3, f"{day.left[0]} of 10000 tokens are still unread after two minutes"
    short = sorted(ms for n, ms in day.took.items() if n)
    assert short[len(short) // 2] < 2000


def test_of_two_long_prompts_both_are_read_and_a_short_one_waits_for_neither() -> None:
    day = Day(pace(stall=250, rate=2.0))
    day.arrive(0, 8000)
    day.arrive(1, 8000)
    for _ in range(3):
        day.window(1)
    day.arrive(2, 100)
    while day.left:
        day.window(1)
    assert day.took[2] < 1000 < min(day.took[0], day.took[1])
