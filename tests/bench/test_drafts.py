"""Drafts by kinds of text: sums, the best depth, rows, and a short look at the real engine."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.bench import drafts
from tests.bench.drafts import CONTROLLER, DEPTHS, KINDS, Ask, Total
from tests.bench.engine import BenchError, Done, Engine
from tests.bench.machine import EMBEDDED
from tests.bench.spread import Pair, Series
from tests.bench.subject import Subject


def done(generated: int, ms: float, accepted: int, offered: int) -> Done:
    return Done(generated, 9, 1.0, ms, "length", 0, accepted, offered)


def test_a_turn_sums_tokens_times_and_drafts() -> None:
    sample = Total([done(101, 100.0, 60, 80), done(51, 50.0, 15, 20)]).sample("2")
    assert sample == {"rate 2": pytest.approx(1000), "tokens 2": pytest.approx(2.0), "right 2": pytest.approx(75)}


def test_without_drafts_there_is_no_share_of_right_ones() -> None:
    assert Total([done(101, 100.0, 0, 0)]).sample("0") == {"rate 0": pytest.approx(1000), "tokens 0": 1.0}
    with pytest.raises(BenchError, match="single token"):
        Total([done(1, 0.0, 0, 0)]).sample("0")


def test_every_engine_is_asked_first_in_its_turn() -> None:
    assert [drafts.rotated("abc", n) for n in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def series(*turns: dict[str, float]) -> Series:
    """Turns in which each engine's figures are all the same number."""
    pairs = []
    for turn in turns:
        sample = {f"{metric} {name}": value for name, value in turn.items() for metric in ("rate", "tokens", "right")}
        pairs.append(Pair(sample, None, 0))
    return Series(len(pairs), pairs=pairs)


def test_the_best_depth_is_that_of_the_greatest_median() -> None:
    turns = [{"0": 10.0, "1": 12.0, "2": float(lucky), "3": 1.0} for lucky in (99, 5, 6)]
    assert drafts.best_depth(series(*turns)) == 1
    assert drafts.best_depth(series({"0": 10, "1": 10, "2": 5, "3": 5})) == 0


def test_the_rows_stand_beside_none_and_beside_the_best() -> None:
    rows = drafts.rows_of(series({CONTROLLER: 15, "0": 10, "1": 12, "2": 20, "3": 5}), "Prose")
    assert [row.title for row in rows] == [
        "Prose, beside none",
        "Prose, beside the best fixed depth (always 2)",
        "Prose, tokens a window",
        "Prose, drafts that were right",
    ]
    assert [row.ratio and row.ratio.median for row in rows] == [1.5, 0.75, 0.75, 0.75]
    assert [row.detail for row in rows] == [False, False, True, True]


def test_where_none_is_best_the_row_says_so_and_has_no_share() -> None:
    turn = {f"rate {name}": 5.0 for name in map(str, DEPTHS)} | {f"rate {CONTROLLER}": 4.0, f"right {CONTROLLER}": 50.0}
    rows = drafts.rows_of(Series(1, pairs=[Pair(turn, None, 0)]), "Chat")
    assert rows[1].title == "Chat, beside the best fixed depth (none)"
    assert rows[3].ours is not None and rows[3].peer is None


def test_the_engines_are_the_default_one_and_every_depth() -> None:
    args = drafts.engine_args(2)
    assert list(args) == [CONTROLLER, *map(str, DEPTHS)]
    assert not any(arg.startswith("--spec") for arg in args[CONTROLLER])
    assert args["3"][-3:] == ["--spec", "3", "--spec-fixed"]


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.load(EMBEDDED)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kind_is_several_requests_that_fit(subject: Subject, kind: drafts.Kind) -> None:
    asks = kind.asks(subject)
    assert len(asks) >= 4
    assert len({tuple(ask.ids) for ask in asks}) == len(asks)
    assert all(len(ask.ids) + drafts.GENERATED < drafts.CONTEXT for ask in asks)


def test_the_engines_give_the_same_answers_with_other_drafts(subject: Subject) -> None:
    asks = drafts.predictable(subject)[:2]
    with ExitStack() as stack:
        chosen = {name: drafts.engine_args(1)[name] for name in (CONTROLLER, "0", "3")}
        engines = {name: stack.enter_context(Engine(subject.path, *args)) for name, args in chosen.items()}
        sample = drafts.ask_all(engines, asks, 0)
        assert sample["tokens 0"] == 1 and sample["tokens 3"] > 2 and "right 0" not in sample
        assert sample["gain"] == sample[f"rate {CONTROLLER}"] / sample["rate 0"]


def test_answers_that_differ_are_told(subject: Subject) -> None:
    class Forgetful(Engine):
        """Answers the last token wrongly."""

        def generate(self, ids: object, max_new: int, keys: str) -> tuple[Done, list[int], float]:
            told, tokens, wall_s = super().generate(ids, max_new, keys)  # type: ignore[arg-type]
            return told, [*tokens[:-1], -1], wall_s

    args = drafts.engine_args(1)
    ask = Ask(subject.random_ids(8, 1), f"temperature=0 {subject.endless}")
    with (
        Engine(subject.path, *args[CONTROLLER]) as engine,
        Forgetful(subject.path, *args["0"]) as other,
        pytest.raises(BenchError, match="request 0"),
    ):
        drafts.ask_all({CONTROLLER: engine, "0": other}, [ask], 0)
