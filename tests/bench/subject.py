"""The model that is measured: its file, its tokens, and prompts for it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratad.errors import StrataError
from stratad.model_file import Model, load_model

from tests.bench.engine import BenchError

NEVER = -1e9


@dataclass(frozen=True)
class Subject:
    """A model file and what the bench must know of it."""

    path: Path
    model: Model

    @classmethod
    def load(cls, path: Path) -> Subject:
        """Read the file's metadata. Raises BenchError where that cannot be done."""
        try:
            return cls(path, load_model(path))
        except (OSError, ValueError, StrataError) as error:
            raise BenchError(f"{path}: {error}") from None

    @property
    def name(self) -> str:
        """The file's stem."""
        return self.path.stem

    @property
    def size_mib(self) -> float:
        """Size of the file."""
        return self.path.stat().st_size / 2**20

    @property
    def endless(self) -> str:
        """Keys of an engine request that never ends by itself and leaves nothing to later ones."""
        bias = ",".join(f"{i}:{NEVER:.0f}" for i in sorted(self.model.tokens.end_ids))
        return f"ckpt=0 logit_bias={bias}" if bias else "ckpt=0"

    def any_text(self, seed: int) -> str:
        """Keys of a request for random text: chosen evenly among the 64 likeliest tokens."""
        return f"temperature=100 top_k=64 seed={seed} {self.endless}"

    def random_ids(self, count: int, seed: int) -> list[int]:
        """Tokens of a prompt that no cache can know; the ends of the vocabulary, often special, are left out."""
        size = self.model.tokens.size
        source = random.Random(seed)
        return [source.randrange(min(256, size // 2), size * 31 // 32) for _ in range(count)]

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt that the daemon makes of a conversation."""
        if self.model.template is None:
            raise BenchError(f"{self.name} has no chat template")
        return self.model.tokens.encode_prompt(self.model.template.render(messages))
