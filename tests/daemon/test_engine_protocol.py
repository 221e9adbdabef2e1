from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stratad import engine_protocol as protocol
from stratad.engine_protocol import (
    ANSWERS,
    FLOAT,
    GEN_KEYS,
    IDS,
    INT,
    OBJECT,
    PAIRS,
    REQUESTS,
    TEXT,
    WORD,
    DoneLine,
    Err,
    Gen,
    Info,
    Malformed,
    PromptProgress,
    Ready,
    SlotAdmitted,
    SlotDone,
    SlotErr,
    SlotGen,
    SlotProgress,
    SlotResume,
    SlotStop,
    SlotToken,
    SlotYield,
    Stop,
    TokenLine,
    Unknown,
    Yielded,
    format_line,
    parse_answer,
    parse_request,
    sampling_keys,
)
from stratad.types import Sampling

INTEGERS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
PAIR_LISTS = st.lists(st.tuples(INTEGERS, FLOATS), max_size=4).map(tuple)
WORDS = st.from_regex(r"[a-z_0-9.]{1,8}", fullmatch=True)
SENTENCES = st.from_regex(r"[^\s=][^\n\r\ud800-\udfff]{0,20}\S", fullmatch=True)
BY_KIND: dict[Any, st.SearchStrategy[Any]] = {
    INT: INTEGERS,
    FLOAT: FLOATS,
    WORD: WORDS,
    TEXT: SENTENCES,
    IDS: st.lists(INTEGERS, min_size=1, max_size=5).map(tuple),
    PAIRS: PAIR_LISTS,
    OBJECT: st.dictionaries(WORDS, st.integers() | st.text(), max_size=3),
}


def messages(line: protocol.Line) -> st.SearchStrategy[Any]:
    """Every message that the row's line can carry."""
    parts = {field.name: BY_KIND[field.kind] for field in line.fields}
    if line.keys is not None and line.keys.kinds is None:
        parts[line.keys.into] = st.dictionaries(WORDS, WORDS, max_size=4)
    elif line.keys is not None and line.keys.into:
        optional = {name: BY_KIND[kind] for name, (_, kind) in line.keys.kinds.items()}  # type: ignore[union-attr]
        parts[line.keys.into] = st.fixed_dictionaries({}, optional=optional)
    elif line.keys is not None:
        parts |= {"logprob": st.none() | FLOATS, "top": PAIR_LISTS}
    return st.builds(line.message, **parts)


@given(st.one_of(*(messages(line) for line in ANSWERS)))
def test_every_answer_survives_being_written_and_read(message: Any) -> None:
    raw = format_line(message)
    assert raw.endswith(b"\n") and raw.count(b"\n") == 1
    assert parse_answer(raw[:-1]) == message
    assert parse_answer(raw[:-1] + b"\r") == message


@given(st.one_of(*(messages(line) for line in REQUESTS)))
def test_every_request_survives_being_written_and_read(message: Any) -> None:
    assert parse_request(format_line(message)[:-1]) == message


@given(st.one_of(*(messages(line) for line in ANSWERS if all(not field.kind.rest for field in line.fields))), WORDS)
def test_a_field_more_at_the_end_is_skipped(message: Any, more: str) -> None:
    if isinstance(message, DoneLine | PromptProgress):
        assert parse_answer(format_line(message)[:-1] + b" " + more.encode()) == message


@given(st.binary(max_size=80))
def test_any_bytes_are_read_as_something(data: bytes) -> None:
    parse_answer(data)
    parse_request(data)


@given(st.sampled_from([line.word for line in (*ANSWERS, *REQUESTS)]), st.text(max_size=60))
def test_any_text_after_a_known_word_is_read_as_something(word: str, text: str) -> None:
    raw = f"{word} {text}".encode("utf-8", "replace")
    for message in (parse_answer(raw), parse_request(raw)):
        assert type(message).__module__ == protocol.__name__
        if isinstance(message, TokenLine):
            assert isinstance(message.id, int)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"INFO arch=qwen35moe load_percent=40", Info({"arch": "qwen35moe", "load_percent": "40"})),
        (b"INFO note=a=b", Info({"note": "a=b"})),
        (b"READY 4096 stop", Ready(4096, "stop")),
        (b"READY 4096", Ready(4096)),
        (b"ERR no_memory 3 GiB are missing", Err("no_memory", "3 GiB are missing")),
        (b"PP 64 128 12.5 800", PromptProgress(64, 128, 12.5, 800.0)),
        (b"T 5", TokenLine(5)),
        (b"T 5 lp=-0.25 top=5:-0.25,9:-3", TokenLine(5, -0.25, ((5, -0.25), (9, -3.0)))),
        (b"T 5 new=1 lp=-0.25", TokenLine(5, -0.25)),
        (b"DONE 3 7 1.5 2.5 stop", DoneLine(3, 7, 1.5, 2.5, "stop")),
        (b"DONE 3 7 1.5 2.5 length 0 0 5 1 2 3 4 0.5 2 0 9 9", DoneLine(3, 7, 1.5, 2.5, "length", reused=5, hits=1,
         lookups=2, ram_blobs=3, file_blobs=4, file_mb=0.5, prompt_tokens_read=2)),
        (b"BRESUME 3 17", SlotResume(3, 17)),
        (b"BPP 1 64 128 12.5 800 later", SlotProgress(1, 64, 128, 12.5, 800.0)),
        (b"BADM 2 1", SlotAdmitted(2, 1)),
        (b"BT 2 5", SlotToken(2, 5)),
        (b"BT 63 199999 lp=-0.25 top=5:-0.25,9:-3", SlotToken(63, 199999, -0.25, ((5, -0.25), (9, -3.0)))),
        (b"BDONE 2 40 stop 900.5", SlotDone(2, 40, "stop", 900.5)),
        (b"BDONE 2 40 length 900.5 30 33 200 150 100.5 800 50 later",
         SlotDone(2, 40, "length", 900.5, 30, 33, 200, 150, 100.5, 800.0, 50)),
        (b"BERR 1 context_full prompt (9 tokens) is long", SlotErr(1, "context_full", "prompt (9 tokens) is long")),
        (b"YIELDED 1 512", Yielded(1, 512)),
        (b"BT 2", Malformed("BT 2", "BT: id cannot be read from ''")),
        (b"BT x 5", Malformed("BT x 5", "BT: slot cannot be read from 'x'")),
        (b"BT 2 5x", Malformed("BT 2 5x", "BT: id cannot be read from '5x'")),
        (b"WHAT 1 2", Unknown("WHAT 1 2")),
        (b"", Unknown("")),
        (b"T", Malformed("T", "T: id cannot be read from ''")),
        (b"T x", Malformed("T x", "T: id cannot be read from 'x'")),
        (b"T 5 lp=x", Malformed("T 5 lp=x", "T: lp cannot be read from 'x'")),
        (b"STAT [1]", Malformed("STAT [1]", "STAT: values cannot be read from '[1]'")),
    ],
)  # fmt: skip
def test_answers(line: bytes, message: object) -> None:
    assert parse_answer(line) == message


def test_a_request_has_its_keys_before_the_ids() -> None:
    line = format_line(Gen(5, (1, 2, 3), sampling_keys(Sampling(temperature=0.5, seed=-3, logit_bias={4: -100.0}))))
    assert line == b"GEN 5 seed=-3 temperature=0.5 logit_bias=4:-100.0 1,2,3\n"
    assert format_line(Stop()) == b"STOP\n"
    assert parse_request(b"GEN 5 later=1 1,2") == Gen(5, (1, 2))
    assert parse_request(b"BGEN 3 5 spec_min_p=0.5 1,2") == SlotGen(3, 5, (1, 2), {"spec_min_p": 0.5})
    assert format_line(SlotGen(3, 5, (1, 2), {"out_from": 1})) == b"BGEN 3 5 out_from=1 1,2\n"
    assert (format_line(SlotStop(3)), format_line(SlotYield(3))) == (b"BSTOP 3\n", b"BYIELD 3\n")
    assert isinstance(parse_request(b"GEN 5 seed=1"), Malformed)


def test_a_line_break_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="line break"):
        format_line(Err("name", "a\nGEN 1 2"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_the_other_side_cannot_use_is_not_sent(value: float) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        format_line(Gen(1, (1,), {"temperature": value}))


def test_keys_are_sent_only_where_they_differ_from_the_engines_defaults() -> None:
    assert sampling_keys(Sampling(temperature=0.0, top_k=40, seed=7)) == {"seed": 7}
    assert sampling_keys(Sampling(temperature=0.0, penalty_freq=0.5, logprobs=0, choice=2)) == {
        "seed": 0, "choice": 2, "penalty_freq": 0.5, "penalty_last_n": 64, "logprobs": 0,
    }  # fmt: skip
    everything = Sampling(0.5, 3, 0.9, 0.1, 1.1, 0.2, 0.3, 8, 1, 2, {1: 1.0}, 3)
    others = {"ckpt", "pin", "out_from", "spec_min_p", "spec_p_cum", "spec_p_cum_deep"}
    assert set(sampling_keys(everything)) == set(GEN_KEYS) - others


def test_the_table_covers_every_message() -> None:
    for line in (*ANSWERS, *REQUESTS):
        names = {field.name for field in dataclasses.fields(line.message)}
        assert {field.name for field in line.fields} <= names
