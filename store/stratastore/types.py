"""The words of the store: what is kept, what is asked for, what comes back.

Nothing here knows of LMDB, of HTTP or of an engine. Keys are made by the caller and are opaque: 32 bytes for a page
(the hash of its parent's key and its token ids, rooted in the numeric identity), 1 to 64 bytes for a conversation.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

PAGE_KEY_BYTES = 32
CONVERSATION_KEY_MOST = 64
IDENTITY_MOST = 128
EXTRA_MOST = 1 << 20
PAGES_MOST = 1 << 20
TOKENS_MOST = 1 << 24
TOKEN_TYPECODE = "I"
MIB = 1 << 20


class PageKind(IntEnum):
    """What a page's bytes are. The kind is part of the page's name, so kinds may share one prefix key."""

    MAIN = 1  # keys and values of a full page
    DRAFTER = 2  # the drafter's rows of a full page; may be absent
    TAIL = 3  # the last part page
    CHECKPOINT = 4  # recurrent and convolution state at a position


@dataclass(frozen=True, slots=True)
class PageRef:
    """One page as a conversation holds it.

    `key` 32 bytes; `parent` the key of the main page it continues, None at the root; `position` the number of tokens of
    the prefix that ends with it. Raises ValueError for a key of another length.
    """

    kind: PageKind
    key: bytes
    parent: bytes | None = None
    position: int = 0

    def __post_init__(self) -> None:
        for what, key in (("key", self.key), ("parent", self.parent)):
            if key is not None and len(key) != PAGE_KEY_BYTES:
                raise ValueError(f"page {what} of {len(key)} bytes: must be {PAGE_KEY_BYTES}")
        if not 0 <= self.position < 1 << 32:
            raise ValueError(f"page position {self.position}: must fit 32 bits")

    @property
    def name(self) -> bytes:
        """What the page is stored under: its kind, then its key."""
        return bytes((self.kind,)) + self.key

    @property
    def parent_name(self) -> bytes | None:
        """Name of the page it hangs on; parents are always main pages."""
        return None if self.parent is None else bytes((PageKind.MAIN,)) + self.parent


@dataclass(frozen=True, slots=True)
class Manifest:
    """A conversation's contents: what its image is made of, in an order in which every parent precedes its children.

    `identity` the numeric identity (hex) its bytes belong to; `tokens` all token ids; `cost` what making it again
    would take, in any one unit the caller keeps to (milliseconds of reading); `extra` bytes of the caller's own.
    Raises ValueError naming the field that cannot be stored.
    """

    key: bytes
    identity: str
    tokens: Sequence[int]
    pages: Sequence[PageRef]
    cost: float = 0.0
    extra: bytes = b""

    def __post_init__(self) -> None:
        ids = self.tokens if isinstance(self.tokens, array) else array(TOKEN_TYPECODE, self.tokens)
        object.__setattr__(self, "tokens", ids)
        object.__setattr__(self, "pages", tuple(self.pages))
        self._check_sizes()
        seen: set[bytes] = set()
        for ref in self.pages:
            if ref.name in seen:
                raise ValueError(f"page {ref.name.hex()} appears twice in a manifest")
            if ref.parent_name is not None and ref.parent_name not in seen:
                raise ValueError(f"page {ref.name.hex()} comes before its parent, or without it")
            seen.add(ref.name)

    def _check_sizes(self) -> None:
        if not 1 <= len(self.key) <= CONVERSATION_KEY_MOST:
            raise ValueError(f"conversation key of {len(self.key)} bytes: must be 1 to {CONVERSATION_KEY_MOST}")
        if not 1 <= len(self.identity) <= IDENTITY_MOST or not self.identity.isascii():
            raise ValueError(f"identity {self.identity!r}: must be 1 to {IDENTITY_MOST} ASCII characters")
        for what, length, most in (
            ("tokens", len(self.tokens), TOKENS_MOST),
            ("pages", len(self.pages), PAGES_MOST),
            ("extra", len(self.extra), EXTRA_MOST),
        ):
            if length > most:
                raise ValueError(f"manifest {what}: {length}, at most {most}")
        if not 0.0 <= self.cost < float("inf"):
            raise ValueError(f"cost {self.cost}: must be a finite number, not negative")

    def token_bytes(self) -> bytes:
        """The ids as little-endian 32-bit words."""
        ids = array(TOKEN_TYPECODE, self.tokens)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tobytes()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a list shows of a conversation; times in seconds since the epoch, `weight` uses decayed to now."""

    key: bytes
    identity: str
    stale: bool
    pinned: bool
    held: bool
    tokens: int
    pages: int
    bytes: int
    created: float
    last_use: float
    hits: int
    weight: float
    cost: float


@dataclass(frozen=True, slots=True)
class Found:
    """A conversation that was found; `present[i]` says whether `manifest.pages[i]` has its bytes."""

    manifest: Manifest
    conversation: Conversation
    present: tuple[bool, ...]


class PutOutcome(StrEnum):
    """How a put ended. Everything but STORED leaves the conversation as it was."""

    STORED = "stored"
    TOO_LARGE = "too_large"  # could not fit even alone; nothing was evicted for it
    NO_ROOM = "no_room"  # what is in the way is pinned or in use
    INCOMPLETE = "incomplete"  # the manifest names a page that was neither there nor written
    DEGRADED = "degraded"  # the store cannot write now; see its state
    CANCELLED = "cancelled"  # left without commit


class Reason(StrEnum):
    """Why the store is degraded. The table below says what still works."""

    NO_SPACE = "no_space"
    QUOTA = "quota"
    IO_ERROR = "io_error"
    READ_ONLY = "read_only"
    NO_PERMISSION = "no_permission"
    DELETED = "deleted"
    TRUNCATED = "truncated"
    FOREIGN_FILE = "foreign_file"
    NEWER_FORMAT = "newer_format"
    OWNED = "owned"
    UNUSABLE_PATH = "unusable_path"
    LMDB = "lmdb"
    CLOSED = "closed"


REASON_TEXT = {
    Reason.NO_SPACE: "no space left on the device",
    Reason.QUOTA: "disk quota used up",
    Reason.IO_ERROR: "the device reports an input/output error",
    Reason.READ_ONLY: "the directory is read-only",
    Reason.NO_PERMISSION: "permission denied",
    Reason.DELETED: "the file was deleted or replaced",
    Reason.TRUNCATED: "the file was cut short",
    Reason.FOREIGN_FILE: "the file was not made by this store; it is left alone",
    Reason.NEWER_FORMAT: "the file has a newer format; it is left alone",
    Reason.OWNED: "another process owns the store",
    Reason.UNUSABLE_PATH: "the path cannot be a store directory",
    Reason.LMDB: "LMDB failed",
    Reason.CLOSED: "closed",
}
READS_GO_ON = frozenset({Reason.NO_SPACE, Reason.QUOTA, Reason.READ_ONLY})


@dataclass(frozen=True, slots=True)
class State:
    """`reason` None: everything works. `retry_in_s` is the time to the next attempt at recovery."""

    reason: Reason | None = None
    detail: str = ""
    retry_in_s: float | None = None

    def __str__(self) -> str:
        if self.reason is None:
            return "ok"
        text = REASON_TEXT[self.reason]
        return f"degraded: {text} ({self.detail})" if self.detail else f"degraded: {text}"


@dataclass(frozen=True, slots=True)
class Options:
    """How a store behaves. Raises ValueError naming the option.

    `max_mib` budget in pages of the file; the file itself stays below `file_limit_ratio` times that.
    `half_life_s` after which a use counts half. `commit_mib` most that one commit writes. `chunk_kib` size of a value.
    `compact_waste` share of the file that must be unused before compaction is worth while, when idle for `idle_s`.
    """

    max_mib: int
    half_life_s: float = 6 * 3600.0
    commit_mib: int = 64
    chunk_kib: int = 256
    file_limit_ratio: float = 1.25
    compact_waste: float = 0.35
    compact_least_mib: int = 64
    idle_s: float = 60.0
    flush_s: float = 30.0
    retry_first_s: float = 1.0
    retry_most_s: float = 60.0
    tick_s: float | None = 5.0

    def __post_init__(self) -> None:
        limits: tuple[tuple[str, float, float], ...] = (
            ("max_mib", 4, 1 << 24),
            ("half_life_s", 1, 1e9),
            ("commit_mib", 1, 64),
            ("chunk_kib", 16, 1024),
            ("file_limit_ratio", 1.1, 4),
            ("compact_waste", 0.05, 1),
        )
        for name, least, most in limits:
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"store option {name} = {getattr(self, name)}: must be {least} to {most}")


@dataclass(slots=True)
class Counters:
    """Events since the store was opened."""

    hits: int = 0
    misses: int = 0
    pages_read: int = 0
    bytes_read: int = 0
    pages_written: int = 0
    bytes_written: int = 0
    pages_shared: int = 0  # named by a put and already there
    commits: int = 0
    commit_ms_most: float = 0.0
    evictions: int = 0
    evicted_bytes: int = 0
    puts: dict[str, int] = field(default_factory=dict)
    bad_pages: int = 0
    bad_records: int = 0
    recounts: int = 0
    discarded_files: int = 0
    swept_pages: int = 0
    compactions: int = 0
    degraded: int = 0
    recovered: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Sizes now and counters since the store was opened. `live_bytes` counts used pages of the file."""

    state: State
    path: str
    conversations: int
    pages: int
    pending: int
    live_bytes: int
    file_bytes: int
    budget_bytes: int
    stale_conversations: int
    counters: Counters


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a full walk found; all zero and empty `faults` when the store is sound."""

    conversations: int = 0
    pages: int = 0
    bytes: int = 0
    bad_pages: int = 0
    hollow_pages: int = 0
    faults: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """Nothing to repair."""
        return not self.faults and not self.bad_pages
