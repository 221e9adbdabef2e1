"""A long prompt beside two streams: what the engine's lines say, and a short look at the real engine."""

from __future__ import annotations

import pytest

from tests.bench import company
from tests.bench.company import DEFAULT, SETTINGS, Case, Setting
from tests.bench.engine import BenchError, Engine, Timed
from tests.bench.machine import EMBEDDED
from tests.bench.subject import Subject


@pytest.mark.parametrize(
    ("trained", "length", "context"), [(4096, 3584, 4096), (8192, 7000, 8000), (1 << 18, 7000, 8000)]
)
def test_the_prompt_is_long_but_fits(trained: int, length: int, context: int) -> None:
    assert company.prompt_length(trained) == length
    assert company.context_for(length) == context <= trained


def test_settings_differ_from_the_defaults_in_one_thing_each() -> None:
    assert len(set(SETTINGS)) == len(SETTINGS)
    assert all(s.stall_ms == DEFAULT.stall_ms or s.share == DEFAULT.share for s in SETTINGS)
    assert Setting(100, 0.25).args == ["--stall-target-ms", "100", "--decode-share", "0.25"]


def stream(slot: int, *times: float) -> list[Timed]:
    return [Timed(at, f"BT {slot} 5") for at in times]


READ = Timed(3.0, "BADM 2 1")
LINES = [*stream(0, 0.5, 0.9, 1.1, 1.3, 2.0, 2.9, 3.0, 4.5), *stream(1, 0.2, 0.95, 2.5, 3.0), READ]


def test_a_read_beside_streams_from_its_asking_to_its_end() -> None:
    sample = company.together_sample(LINES, 1.0, 400)
    assert sample["read"] == pytest.approx(200)
    assert sample["streams"] == pytest.approx((5 + 2) / 2)
    assert sample["gap"] == pytest.approx(1550)  # of slot 1, from before the asking on


def test_a_gap_outside_the_time_does_not_count() -> None:
    assert company.longest_gap_ms(stream(0, 0, 5, 6, 7, 20), 5, 7) == pytest.approx(1000)
    assert company.longest_gap_ms(stream(0, 0, 5, 6, 7, 20), 5, 7.1) == pytest.approx(13_000)
    assert company.longest_gap_ms([], 0, 1) == 0


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([line for line in LINES if line is not READ], "not read to its end"),
        ([*LINES, Timed(2.0, "BDONE 1 9 length")], "stream 1 ended"),
        ([line for line in LINES if line.line != "BT 1 5"], "stream 1 made no token"),
    ],
)
def test_streams_that_did_not_accompany_the_read_are_told(lines: list[Timed], text: str) -> None:
    with pytest.raises(BenchError, match=text):
        company.together_sample(lines, 1.0, 400)


def test_the_engine_is_measured_alone_and_together() -> None:
    subject, length = Subject.load(EMBEDDED), 1750
    args = ["--threads", "1", "--spec", "0", "--parallel", "3", "--max-context", str(company.context_for(length))]
    with Engine(subject.path, *args, *DEFAULT.args) as engine:
        case = Case(engine, subject, DEFAULT, length)
        alone, together = case.alone(0), case.together(0)
    assert alone.keys() == together.keys()
    assert alone["gap"] == DEFAULT.stall_ms
    assert min(*alone.values(), *together.values()) > 0
