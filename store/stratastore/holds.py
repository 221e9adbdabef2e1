"""What is needed right now: pages and conversations that eviction must leave alone. In memory only, for any thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable


class Holds:
    """Counts holders by name. A crash forgets them, as it forgets who was waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[bytes] = Counter()

    def add(self, names: Iterable[bytes]) -> None:
        """One holder more for each name."""
        with self._lock:
            self._counts.update(names)

    def release(self, names: Iterable[bytes]) -> None:
        """One holder less for each name."""
        with self._lock:
            for name in names:
                self._counts[name] -= 1
                if self._counts[name] <= 0:
                    del self._counts[name]

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._counts

    def __len__(self) -> int:
        with self._lock:
            return len(self._counts)
