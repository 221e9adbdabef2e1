"""Text out of token bytes, whatever way characters are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stratad.detokenizer import Detokenizer

FAMILY = "👨‍👩‍👧‍👦"


def feed_all(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer()
    return [*(detokenizer.feed(piece) for piece in pieces), detokenizer.flush()]


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        ([b"\xf0\x9f", b"\x98\xb8"], ["", "😸", ""]),
        ([b"\xe4", b"\xbd\xa0!"], ["", "你!", ""]),
        ([b"a\xc3", b"\xa9b"], ["a", "éb", ""]),
        ([b"\xf0\x9f"], ["", "�"]),  # cut in the middle: one mark for what is left
        ([b"\xf0\x9f", b"A"], ["", "�A", ""]),
        ([b"\xff\xfe"], ["��", ""]),
        ([b"\xe2\x82", b"\xe2\x82\xac"], ["", "�€", ""]),
        ([b"\xc0\xaf"], ["��", ""]),  # an overlong slash is no slash
        ([b"", b"x", b""], ["", "x", "", ""]),
    ],
)
def test_characters_are_released_as_soon_as_they_are_whole(pieces: list[bytes], texts: list[str]) -> None:
    assert feed_all(pieces) == texts


def test_each_member_of_a_family_is_released_at_once() -> None:
    data = FAMILY.encode()
    texts = feed_all([data[i : i + 3] for i in range(0, len(data), 3)])
    assert "".join(texts) == FAMILY
    assert "�" not in "".join(texts)
    assert sum(1 for text in texts if text) > 3


@given(st.binary(), st.lists(st.integers(0, 64)))
def test_the_text_does_not_depend_on_the_cuts(data: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in itertools.pairwise(places)]
    assert "".join(feed_all(pieces)) == data.decode("utf-8", "replace")


@given(st.text())
def test_nothing_complete_is_held_back(text: str) -> None:
    detokenizer = Detokenizer()
    for char in text:
        data = char.encode()
        assert "".join(detokenizer.feed(data[i : i + 1]) for i in range(len(data))) == char
    assert detokenizer.flush() == ""
