"""Whether the store works, and when to try again if not."""

from __future__ import annotations

import logging
from collections.abc import Callable

from stratastore.types import READS_GO_ON, Counters, Options, Reason, State

_logger = logging.getLogger("stratastore")


class Health:
    """The state: `ok` or degraded for one reason, with a back-off that doubles while recovery fails.

    Changed by the writer thread alone; read by any.
    """

    def __init__(self, options: Options, counters: Counters, now: Callable[[], float]) -> None:
        self._first_s = options.retry_first_s
        self._most_s = options.retry_most_s
        self._counters = counters
        self._now = now
        self._reason: Reason | None = Reason.CLOSED
        self._detail = "not opened yet"
        self._wait_s = self._first_s
        self._retry_at = 0.0

    @property
    def reason(self) -> Reason | None:
        """None: all is well."""
        return self._reason

    @property
    def readable(self) -> bool:
        """What is stored may still be read."""
        return self._reason is None or self._reason in READS_GO_ON

    def state(self) -> State:
        """For status."""
        if self._reason is None:
            return State()
        retry = None if self._reason is Reason.CLOSED else max(0.0, self._retry_at - self._now())
        return State(self._reason, self._detail, retry)

    def due(self) -> bool:
        """Degraded, and time to try again."""
        return self._reason not in (None, Reason.CLOSED) and self._now() >= self._retry_at

    def degrade(self, reason: Reason, detail: str) -> None:
        """Something failed. One warning for each change of reason, however often it fails."""
        if self._reason is None:
            self._wait_s = self._first_s
        if reason is not self._reason and reason is not Reason.CLOSED:
            _logger.warning("store degraded, requests go on uncached: %s", State(reason, detail))
            self._counters.degraded += 1
        self._reason, self._detail = reason, detail
        self._retry_at = self._now() + self._wait_s
        self._wait_s = min(2 * self._wait_s, self._most_s)

    def recover(self) -> None:
        """All is well (again)."""
        if self._reason not in (None, Reason.CLOSED):
            _logger.warning("store works again")
            self._counters.recovered += 1
        self._reason, self._detail, self._wait_s = None, "", self._first_s
