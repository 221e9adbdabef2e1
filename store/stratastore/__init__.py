"""The conversation store: pages, checkpoints and manifests in LMDB, with a budget, for one process.

Keys and bytes are the caller's and opaque. Start with `Store`.
"""

from stratastore.store import Put, Store
from stratastore.types import (
    Conversation,
    Counters,
    Found,
    Manifest,
    Options,
    PageKind,
    PageRef,
    PutOutcome,
    Reason,
    State,
    Stats,
    Verdict,
)

__all__ = [
    "Conversation",
    "Counters",
    "Found",
    "Manifest",
    "Options",
    "PageKind",
    "PageRef",
    "Put",
    "PutOutcome",
    "Reason",
    "State",
    "Stats",
    "Store",
    "Verdict",
]
