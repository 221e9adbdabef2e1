"""A failure's text is one printable line, whatever went into it."""

from __future__ import annotations

import pickle

import pytest
from strata_native import ffi, lib
from strata_native.errors import StrataNativeError, from_struct


def set_error(text: bytes, name: bytes = b"model_format") -> StrataNativeError:
    err = ffi.new("st_error *")
    assert lib.st_error_set(err, name, text) == -1
    return from_struct(ffi, err)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"plain text", "plain text"),
        ("größe 模型 🙂".encode(), "größe 模型 🙂"),
        (b"a\nERR b\r\tc", r"a\nERR b\r\tc"),
        (b"\x1b[31mred\x7f\x01", r"\x1b[31mred\x7f\x01"),
        (b"\xff\xc3", r"\xff\xc3"),
        (b"\xc0\xaf \xed\xa0\x80 \xf4\x90\x80\x80", r"\xc0\xaf \xed\xa0\x80 \xf4\x90\x80\x80"),  # overlong, surrogate
        ("a\u2028b\u202ec\x85d\ufeffe".encode(), r"a\xe2\x80\xa8b\xe2\x80\xaec\xc2\x85d\xef\xbb\xbfe"),
        (b"\xe2\x82", r"\xe2\x82"),
    ],
)
def test_text_is_escaped(raw: bytes, shown: str) -> None:
    assert set_error(raw).text == shown


@pytest.mark.parametrize("piece", ["x", "é", "模", "🙂", "\n", "\u2028"])
def test_a_long_text_is_cut_between_characters(piece: str) -> None:
    for pad in range(8):
        text = set_error(b"-" * pad + piece.encode() * 600).text
        assert 460 < len(text.encode()) < 480
        assert text.endswith("...") and "�" not in text and text.isprintable()


def test_the_longest_text_that_fits_is_whole() -> None:
    assert set_error(b"x" * 476).text == "x" * 476
    assert set_error(b"x" * 477).text == "x" * 476 + "..."


def test_a_long_name_is_cut_and_no_struct_is_fine() -> None:
    assert set_error(b"t", b"n" * 40).name == "n" * 31
    assert lib.st_error_set(ffi.NULL, b"internal", b"text") == -1


def test_the_exception_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(StrataNativeError("model_open", "f: gone")))
    assert (error.name, error.text, str(error)) == ("model_open", "f: gone", "model_open: f: gone")
