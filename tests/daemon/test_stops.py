"""Stop strings against an oracle that looks at the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from stratad.stops import StopMatcher


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text before the stop string that is completed first (the longest of several), and which one it was."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def feed_all(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    out = [matcher.feed(piece) for piece in pieces]
    return [*out, matcher.flush()], matcher.hit


@pytest.mark.parametrize(
    ("pieces", "stops", "texts"),
    [
        (["The quick br", "own", " fox"], ["own fox"], ["The quick br", "", "", ""]),
        (["a", "\nUs", "ers are"], ["\nUser:"], ["a", "", "\nUsers are", ""]),
        (["so \nUs"], ["\nUser:"], ["so ", "\nUs"]),  # a held tail comes out at the end
        (
            ["x END", "ING y"],
            ["END", "ENDING"],
            ["x ", "", ""],
        ),  # the shorter is there first
        (["smile 😸", "😹 on"], ["😸😹"], ["smile ", "", ""]),
        (["aab", "aac"], ["aabaac"], ["", "", ""]),
        (["aabaab", "aac!"], ["aabaac"], ["aab", "", ""]),
        (["abcabd"], ["abd"], ["abc", ""]),
        (["none"], [], ["none", ""]),
        (["xabcd"], ["abcd", "bc"], ["xa", ""]),
    ],
)
def test_stop_strings_over_token_borders(pieces: list[str], stops: list[str], texts: list[str]) -> None:
    assert feed_all(pieces, stops)[0] == texts


LETTERS = st.text(alphabet="ab😸", max_size=8)
STOPS = st.lists(st.text(alphabet="ab😸", min_size=1, max_size=4), max_size=4)


@given(st.lists(LETTERS, max_size=12), STOPS)
@example(["ab", "abab", "a"], ["ababa", "bb"])
def test_streaming_equals_the_oracle(pieces: list[str], stops: list[str]) -> None:
    texts, hit = feed_all(pieces, stops)
    assert ("".join(texts), hit) == oracle("".join(pieces), stops)


@given(st.lists(LETTERS, max_size=12), STOPS)
def test_only_a_possible_match_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = sent = ""
    for piece in pieces:
        seen += piece
        sent += matcher.feed(piece)
        if matcher.hit is not None:
            break
        held = seen[len(sent) :]
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        longest = max((end for end in beginnings if seen.endswith(end)), key=len, default="")
        assert held == longest


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    assert [matcher.feed("axb"), matcher.feed("c"), matcher.flush()] == ["a", "", ""]
    assert matcher.hit == "x"
