"""Fixtures of the native room: the engine on the embedded model, and what a float32 reference says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.native.driver import ROOT, Engine


@dataclass(frozen=True)
class Prompt:
    """One prompt of the reference: float32 PyTorch on the dequantised values of the file, greedy."""

    name: str
    ids: tuple[int, ...]
    greedy: tuple[int, ...]
    answer_len: int  # tokens of the answer, its end token included
    top5: dict[int, float]  # logits of the first token

    def __str__(self) -> str:
        return self.name


def load_prompts() -> list[Prompt]:
    """Every prompt of the reference file."""
    prompts = json.loads((ROOT / "native" / "models" / "reference_Q4_0.json").read_text())["prompts"]
    return [
        Prompt(p["name"], tuple(p["ids"]), tuple(p["greedy"]), p["answer_len"], {int(i): lp for i, lp in p["top5"]})
        for p in prompts
    ]


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    return load_prompts()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine for the tests of a module; each request of theirs must leave it usable."""
    with Engine("--threads", "2") as running:
        yield running
