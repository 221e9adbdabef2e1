"""How running exchanges learn that the server is stopping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Drain:
    """Two signals: `begin`, after which nothing new starts, and `cut`, at which running answers end.

    Exchanges register a callback for the signal they care for. Everything happens on the event loop.
    """

    def __init__(self) -> None:
        self.begun = False
        self.is_cut = False
        self._on_begin: set[Callable[[], None]] = set()
        self._on_cut: set[Callable[[], None]] = set()

    def begin(self) -> None:
        """Start draining: unfinished requests are turned away, running answers go on."""
        self.begun = True
        _call_all(self._on_begin)

    def cut(self) -> None:
        """End running answers now."""
        self.is_cut = True
        _call_all(self._on_cut)

    @contextmanager
    def at_begin(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` if draining begins within the block, or has begun."""
        with _registered(self._on_begin, callback, self.begun):
            yield

    @contextmanager
    def at_cut(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` if answers are cut within the block, or have been."""
        with _registered(self._on_cut, callback, self.is_cut):
            yield


def _call_all(callbacks: set[Callable[[], None]]) -> None:
    for callback in list(callbacks):
        callback()


@contextmanager
def _registered(callbacks: set[Callable[[], None]], callback: Callable[[], None], now: bool) -> Iterator[None]:
    callbacks.add(callback)
    try:
        if now:
            callback()
        yield
    finally:
        callbacks.discard(callback)
