"""Stop strings, found across token borders while an answer is being streamed."""

from __future__ import annotations

from collections.abc import Sequence


class _Prefix:
    """How far one stop string has been matched at the end of the text so far (Knuth, Morris and Pratt)."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = _borders(stop)

    def step(self, char: str) -> bool:
        """Take one character; True when it completes the stop string."""
        matched = self.matched
        while matched and self.stop[matched] != char:
            matched = self._borders[matched - 1]
        if self.stop[matched] == char:
            matched += 1
        self.matched = matched
        return matched == len(self.stop)


def _borders(word: str) -> list[int]:
    """For each prefix of `word`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = borders[length - 1]
        if word[i] == word[length]:
            length += 1
        borders[i] = length
    return borders


class StopMatcher:
    """Passes text on up to the first stop string; holds back only what may still become one.

    First is the stop string that is completed first; of several completed by the same character the longest counts.
    So the result is a function of the text, not of how it was cut into tokens. The cost is a few steps per
    character, none for text in which no stop string begins.
    """

    __slots__ = ("_held", "_openings", "_prefixes", "hit")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are non-empty texts; none at all is fine."""
        self._prefixes = [_Prefix(stop) for stop in stops]
        self._openings = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """The text that may go out now. After a match `hit` is the stop string, and all further text is swallowed."""
        if self.hit is not None:
            return ""
        if not self._held and self._openings.isdisjoint(text):
            return text
        for position, char in enumerate(text):
            complete = [prefix.stop for prefix in self._prefixes if prefix.step(char)]
            if complete:
                self.hit = max(complete, key=len)
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen[: len(seen) - len(self.hit)]
        seen = self._held + text
        keep = len(seen) - max(prefix.matched for prefix in self._prefixes)
        self._held = seen[keep:]
        return seen[:keep]

    def flush(self) -> str:
        """The text still held back when the answer ends without a match."""
        held, self._held = self._held, ""
        return "" if self.hit is not None else held
