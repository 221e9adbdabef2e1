"""Token bytes in, text out, while an answer is being produced."""

from __future__ import annotations

import codecs

_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Joins token bytes to characters. A character is released as soon as its last byte is there, never earlier.

    Bytes that can no longer become a character turn into one U+FFFD per maximal subpart (the Unicode standard's
    practice), so the text does not depend on where tokens end.
    """

    __slots__ = ("_decode",)

    def __init__(self) -> None:
        self._decode = _decoder("replace").decode

    def feed(self, data: bytes) -> str:
        """The characters that `data` completes; empty while one is still open."""
        return self._decode(data)

    def flush(self) -> str:
        """What is still open when the answer ends: U+FFFD or nothing."""
        return self._decode(b"", True)
