"""Spreads, ratios and turns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest

from tests.bench.spread import QUIET, Pair, Plan, Sample, Series, Spread, take_turns


class Silence:
    """A machine whose other programs take what a script says, pair by pair; then nothing."""

    def __init__(self, shares: Sequence[float] = ()) -> None:
        self.shares = list(shares)
        self.waits: list[tuple[float, float]] = []
        self.started = 0

    def wait_for_quiet(self, limit_s: float, allowed: float) -> None:
        self.waits.append((limit_s, allowed))

    def start(self) -> None:
        self.started += 1

    def foreign_share(self) -> float:
        return self.shares.pop(0) if self.shares else 0.0


def pair(ours: float, peer: float | None, foreign: float = 0.0) -> Pair:
    return Pair({"speed": ours}, None if peer is None else {"speed": peer}, foreign)


def test_spread_tells_least_median_and_greatest() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(1.0, 2.0, 3.0, 3)
    assert Spread.of([4.0, 1.0, 2.0, 3.0]) == Spread(1.0, 2.5, 4.0, 4)
    assert Spread.of([]) is None


def test_width_is_greatest_by_least() -> None:
    assert Spread(2.0, 2.5, 3.0, 3).width == pytest.approx(1.5)
    assert Spread(0.0, 1.0, 2.0, 3).width == float("inf")


def test_the_ratio_is_made_pair_by_pair() -> None:
    """Medians of both sides would say 100 / 100; but within each pair we were twice as fast."""
    series = Series(3, pairs=[pair(200, 100), pair(100, 50), pair(60, 30)])
    assert series.ratio("speed") == Spread(2.0, 2.0, 2.0, 3)
    assert series.ours("speed") == Spread(60, 100, 200, 3)
    assert series.peer("speed") == Spread(30, 50, 100, 3)


@pytest.mark.parametrize("peer", [None, 0.0, -1.0])
def test_no_ratio_without_a_peer_that_measured_something(peer: float | None) -> None:
    assert pair(5, peer).ratio("speed") is None
    assert pair(5, 1).ratio("memory") is None


def test_disturbed_pairs_do_not_count_where_there_are_enough_others() -> None:
    series = Series(2, pairs=[pair(1, 1), pair(9, 1, foreign=QUIET + 0.01), pair(1, 1, foreign=QUIET)])
    assert series.ratio("speed") == Spread(1, 1, 1, 2)
    assert not series.disturbed


def test_else_the_least_disturbed_count_whatever_they_measured() -> None:
    series = Series(2, pairs=[pair(9, 1, 0.8), pair(2, 1, 0.3), pair(5, 1, 0.5)])
    assert series.ratio("speed") == Spread(2, 3.5, 5, 2)
    assert series.disturbed
    assert series.foreign == 0.5


def test_company_may_have_what_is_left_free() -> None:
    plan = Plan(pairs=1, most=3).leaving(0.5)
    series = take_turns(lambda _: {"speed": 1}, lambda _: {"speed": 1}, plan, Silence([0.55]), ["speed"])
    assert len(series.pairs) == 1
    assert not series.disturbed


def test_sides_take_turns_and_change_the_order() -> None:
    order: list[str] = []

    def side(name: str) -> Sample:
        order.append(name)
        return {"speed": 1.0}

    watch = Silence()
    take_turns(lambda n: side(f"A{n}"), lambda n: side(f"B{n}"), Plan(pairs=3, quiet_wait_s=7), watch, ["speed"])
    assert order == ["A0", "B0", "B1", "A1", "A2", "B2"]
    assert watch.waits == [(7, QUIET)] * 3
    assert watch.started == 3


def test_disturbed_pairs_are_measured_again() -> None:
    watch = Silence([0.9, 0.0, 0.9, 0.0])
    series = take_turns(lambda _: {"speed": 1}, lambda _: {"speed": 2}, Plan(pairs=2, most=9), watch, ["speed"])
    assert [p.foreign for p in series.pairs] == [0.9, 0.0, 0.9, 0.0]
    assert series.ratio("speed") == Spread(0.5, 0.5, 0.5, 2)


def test_a_wide_spread_asks_for_more_pairs_up_to_the_limit() -> None:
    plan = Plan(pairs=2, most=6, wide=1.2)
    noisy = take_turns(lambda n: {"speed": 1 + n % 2}, lambda _: {"speed": 1}, plan, Silence(), ["speed"])
    steady = take_turns(lambda n: {"speed": 1 + n / 100}, lambda _: {"speed": 1}, plan, Silence(), ["speed"])
    other = take_turns(lambda n: {"speed": 1, "memory": 1 + n}, lambda _: {"speed": 1}, plan, Silence(), ["speed"])
    assert [len(noisy.pairs), len(steady.pairs), len(other.pairs)] == [6, 2, 2]


def test_without_a_peer_our_own_spread_decides() -> None:
    plan = Plan(pairs=2, most=4)
    series = take_turns(lambda n: {"speed": 10.0 * (1 + n % 2)}, None, plan, Silence(), ["speed"])
    assert len(series.pairs) == 4
    assert series.ratio("speed") is None
    assert series.ours("speed") == Spread(10, 15, 20, 4)


def test_no_pair_begins_that_would_end_after_the_limit() -> None:
    now = [0.0]

    def side(_turn: int) -> Sample:
        now[0] += 5
        return {"speed": 1.0}

    def pairs_within(limit_s: float) -> int:
        plan = Plan(pairs=9, most=9, limit_s=limit_s)
        return len(take_turns(side, side, plan, Silence(), ["speed"], clock=lambda: now[0]).pairs)

    assert [pairs_within(limit) for limit in (0.0, 19.0, 20.0, 35.0, 1000.0)] == [1, 1, 2, 3, 9]


def test_comparisons_share_the_time_of_a_plan() -> None:
    assert Plan(limit_s=60).among(5).limit_s == 12
    assert Plan().among(5).limit_s == math.inf


def test_sides_that_were_measured_together_become_pairs() -> None:
    turns = Series(2, 0.3, [Pair({"a": 6.0, "b": 3.0}, None, 0.2), Pair({"a": 8.0}, None, 0.0)])
    series = turns.between({"speed": "a"}, {"speed": "b"})
    assert (series.wanted, series.allowed, series.foreign) == (2, 0.3, 0.2)
    assert series.ours("speed") == Spread(6, 7, 8, 2)
    assert series.ratio("speed") == Spread(2, 2, 2, 1)


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().pairs = 1  # type: ignore[misc]
