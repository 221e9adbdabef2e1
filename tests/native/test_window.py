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


def pace(max_rows: int = 512, stall: float = 250.0, share: float = 0.5, row: float = 0.0, decode: float = 0.0) -> Any:
    p = ffi.new("st_pace *")
    lib.st_pace_init(p, max_rows, stall, share)
    p.row_ms, p.decode_ms, p.tried = row, decode, max_rows if row else p.tried
    return p


def account(p: Any, ms: float, prompt_rows: int, decoders: int, depth: float = 0.0) -> None:
    lib.st_pace_account(p, ms, prompt_rows, depth, decoders)


def decoding(rows: int = 1) -> dict[str, float]:
    return {"decoding": rows}


def reading(tokens: int, cut: int | None = None, waited: float = 0.0, depth: int = 0) -> dict[str, float]:
    return {"reading": tokens, "depth": depth, "until_cut": tokens if cut is None else cut, "waited_ms": waited}


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
    """100 ms, 10 of them for the decoding slots, hold 180 rows of half a millisecond."""
    assert plan(pace(stall=100, row=0.5, decode=10), [decoding(4), reading(5000)]) == [4, 180]
    assert plan(pace(stall=1000, row=0.5, decode=10), [decoding(4), reading(5000)]) == [4, 512]


def test_where_decoding_alone_takes_longer_than_the_target_a_window_may_take_twice_that() -> None:
    assert plan(pace(stall=100, row=2, decode=80), [decoding(4), reading(5000)]) == [4, 40]


@pytest.mark.parametrize("rows", [1, 5, 9, 100])
@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_a_read_goes_on_however_short_the_window_and_however_many_decode(chunk: int, rows: int) -> None:
    got = plan(pace(max_rows=chunk, stall=1, row=1000), [decoding(rows), reading(5000)])
    assert got == [rows, min(chunk, 8)]


def test_a_machine_not_yet_known_is_probed_with_a_short_chunk() -> None:
    assert plan(pace(), [decoding(), reading(5000)]) == [1, 32]


def test_a_read_stops_at_its_cut_and_others_use_the_rest() -> None:
    assert plan(pace(), [reading(300, cut=50), reading(1000)]) == [50, 462]


def test_the_shortest_is_read_first() -> None:
    assert plan(pace(), [reading(3000), reading(600), reading(10)]) == [0, 502, 10]


def test_who_has_waited_long_comes_before_who_is_short() -> None:
    assert plan(pace(row=1), [reading(3000, waited=2500), reading(600)]) == [512, 0]


def owing(p: Any, ms: float) -> Any:
    p.debt_ms = ms
    return p


def test_owed_decode_time_holds_prompts_back_only_while_somebody_decodes() -> None:
    assert plan(owing(pace(row=0.5), 3), [decoding(), reading(50)]) == [1, 0]
    assert plan(owing(pace(row=0.5), 3), [{}, reading(50)]) == [0, 50]


def test_decode_time_is_owed_for_prompt_rows_and_repaid_by_decode_windows() -> None:
    p = pace(share=0.5)
    account(p, 100.0, 90, 2)
    assert p.debt_ms == 50
    account(p, 30.0, 0, 2)
    assert p.debt_ms == 20
    account(p, 30.0, 0, 2)
    assert p.debt_ms == -10  # counts for the next prompt rows,
    account(p, 30.0, 0, 2)
    assert p.debt_ms == -30  # but no more of it than one window
    account(p, 130.0, 90, 2)
    assert p.debt_ms == 20  # 30 of the 130 ms were the decoding slots' own
    account(p, 1.0, 0, 0)
    assert p.debt_ms == 0  # nobody decodes any more


def test_a_dearer_row_is_believed_at_once_and_a_cheaper_one_by_degrees() -> None:
    p = pace()
    account(p, 100.0, 400, 0)
    assert p.row_ms == 0.25
    account(p, 100.0, 100, 1)
    assert p.row_ms == 1
    account(p, 100.0, 2, 1)  # a handful of rows says nothing
    assert p.row_ms == 1
    for _ in range(20):
        account(p, 50.0, 100, 1)
    assert p.row_ms == pytest.approx(0.5, rel=0.01)


def test_a_row_is_dearer_the_deeper_it_stands() -> None:
    """Learned from one long prompt, it holds for the next one, at whatever depth that begins."""
    p = pace(stall=100)
    for depth in range(0, 8192, 512):
        account(p, 256 * (1 + (depth + 256) / 2000), 512, 0, depth + 256)
    assert p.row_ms == pytest.approx(0.5, rel=0.01)
    assert p.deeper == pytest.approx(1 / 2000, rel=0.01)
    (_, shallow), (_, deep) = (plan(p, [decoding(), reading(5000, depth=d)]) for d in (0, 6000))
    assert shallow * 0.5 * (1 + shallow / 4000) == pytest.approx(100, rel=0.02)
    assert deep * 0.5 * (4 + deep / 4000) == pytest.approx(100, rel=0.02)


def test_a_count_of_rows_is_come_by_in_steps() -> None:
    p = pace(stall=1e6, max_rows=4096, share=0)
    sizes = []
    for _ in range(8):
        sizes.append(plan(p, [decoding(), reading(100000)])[1])
        account(p, sizes[-1] * 1.0, sizes[-1], 1)
    assert sizes == [32, 64, 128, 256, 512, 1024, 2048, 4096]


def test_the_decode_time_is_that_of_recent_windows_without_prompt_rows() -> None:
    p = pace()
    account(p, 20.0, 0, 2)
    assert p.decode_ms == 20
    for _ in range(20):
        account(p, 40.0, 0, 4)
    assert p.decode_ms == pytest.approx(40, rel=0.01)
    account(p, 140.0, 100, 4)
    assert p.row_ms == pytest.approx(1, rel=0.01)


SLOT: st.SearchStrategy[dict[str, float]] = st.one_of(
    st.just({}),
    st.integers(1, 9).map(decoding),
    st.builds(reading, st.integers(1, 100000), st.integers(0, 100000), st.floats(0, 1e7), st.integers(0, 100000)),
)


@given(
    st.lists(SLOT, min_size=1, max_size=65),
    st.integers(1, 4000),
    st.floats(1, 1e5),
    st.floats(0, 1e3),
    st.floats(0, 1e5),
    st.sampled_from([-5.0, 0.0, 5.0]),
)
def test_any_window_is_within_its_bounds(
    slots: list[dict[str, float]], chunk: int, stall: float, row: float, decode: float, debt: float
) -> None:
    rows = plan(owing(pace(chunk, stall, 0.5, row, decode), debt), slots)
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
    if any("reading" in s for s in slots) and not (decoders and debt > 0):
        assert prompt >= 1


# ---- whole days --------------------------------------------------------------------------------------------------


@dataclass
class Day:
    """A machine that reads `rate` rows a millisecond and needs `decode_ms` for a window that only decodes.

    A row costs `deeper` of itself more for every thousand positions before it, a window `begin_ms` in any case.
    """

    pace: Any
    rate: float = 2.0
    decode_ms: float = 5.0
    deeper: float = 0.0
    begin_ms: float = 0.0
    now: float = 0.0
    left: dict[int, int] = field(default_factory=dict)  # prompt tokens still to read, by request
    done: dict[int, int] = field(default_factory=dict)  # tokens read
    since: dict[int, float] = field(default_factory=dict)  # when it had its last rows
    came: dict[int, float] = field(default_factory=dict)
    took: dict[int, float] = field(default_factory=dict)

    def arrive(self, name: int, tokens: int) -> None:
        self.left[name], self.done[name] = tokens, 0
        self.since[name] = self.came[name] = self.now

    def window(self, decoders: int) -> tuple[float, int]:
        """One window; its ms and prompt rows."""
        names = list(self.left)
        slots = [decoding() for _ in range(decoders)]
        slots += [reading(self.left[n], waited=self.now - self.since[n], depth=self.done[n]) for n in names]
        if not slots:
            self.now += 1
            return 0, 0
        rows = plan(self.pace, slots)
        prompt = sum(rows[decoders:])
        ms = sum(
            got / self.rate * (1 + self.deeper * (self.done[n] + got / 2) / 1000)
            for n, got in zip(names, rows[decoders:], strict=True)
        )
        ms += self.decode_ms * bool(decoders) + self.begin_ms
        self.now += ms
        depth = sum(g * (self.done[n] + g / 2) for n, g in zip(names, rows[decoders:], strict=True))
        account(self.pace, ms, prompt, decoders, depth / max(prompt, 1))
        for name, got in zip(names, rows[decoders:], strict=True):
            if got:
                self.left[name] -= got
                self.done[name] += got
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
    read = spent[True] - day.decode_ms * sum(g > day.decode_ms for g in gaps)
    assert spent[False] >= share * (read - max(gaps)) - day.decode_ms  # what the last one is owed comes after the end
    assert spent[False] <= share * read + 2 * day.decode_ms
    assert max(gaps) <= 100 + day.decode_ms


@pytest.mark.parametrize("stall", [50, 250, 1000])
@pytest.mark.parametrize("deeper", [0.3, 1.0])
@pytest.mark.parametrize("begin", [0.0, 20.0])
def test_a_window_keeps_to_the_target_however_deep_the_prompt_and_is_not_cut_shorter(
    stall: float, deeper: float, begin: float
) -> None:
    day = Day(pace(stall=stall, max_rows=4096), deeper=deeper, begin_ms=begin)
    day.window(2)
    day.arrive(0, 20000)
    gaps = []
    while day.left:
        ms, prompt = day.window(2)
        gaps += [ms] if prompt > 8 else []  # of so few rows a window may take as long as it must
    settled = gaps[8:-1]
    assert max(gaps) <= 1.25 * stall
    assert min(settled) >= 0.8 * stall
    assert max(settled) <= 1.1 * stall


def test_a_long_prompt_among_ever_new_short_ones_is_read() -> None:
    """Short prompts keep the machine busy nine tenths of the time; the long one would take 5 s alone."""
    rng, day = random.Random(1), Day(pace(stall=250, row=0.5))
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
    day = Day(pace(stall=250, row=0.5))
    day.arrive(0, 8000)
    day.arrive(1, 8000)
    for _ in range(3):
        day.window(1)
    day.arrive(2, 100)
    while day.left:
        day.window(1)
    assert day.took[2] < 1000 < min(day.took[0], day.took[1])
