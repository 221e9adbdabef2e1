"""The committed texts as token ids of a model, and its perplexity on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from strata_native.gguf import GGUF
from stratad.tokens import Tokens

from tests.native.numpy_reference import log_softmax

DATA = Path(__file__).with_name("data")
WINDOW = 512  # tokens of a piece of prose; each piece is read from an empty context
ANSWER = "<|im_start|>assistant\n<think>\n\n</think>\n\n"  # how the embedded model's answers begin

Logits = Callable[[Sequence[int]], npt.NDArray[Any]]


def tokens_of(model: Path) -> Tokens:
    """The tokenizer of a model file."""
    with GGUF(model) as file:
        return Tokens(dict(file.metadata))


def dialogues() -> list[str]:
    """Conversations in the form of the embedded model's training data."""
    return (DATA / "dialogues.txt").read_text().split("=====\n")


def prose() -> str:
    return (DATA / "prose.txt").read_text()


def prose_windows(tokens: Tokens) -> list[list[int]]:
    """The prose in pieces of WINDOW tokens."""
    ids = tokens.encode(prose())
    return [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)]


def mean_loss(logits: Logits, documents: Sequence[Sequence[int]]) -> float:
    """Mean negative log-likelihood in nats of every token but each document's first; perplexity is its exp."""
    total, count = 0.0, 0
    for ids in documents:
        rows = log_softmax(np.asarray(logits(ids), np.float64))[:-1]
        total -= float(rows[np.arange(len(rows)), list(ids[1:])].sum())
        count += len(rows)
    return total / count


def answer_prompts(tokens: Tokens) -> list[list[int]]:
    """Every beginning of a conversation that the embedded model is to go on with."""
    prompts = []
    for text in dialogues():
        at = text.find(ANSWER)
        while at >= 0:
            prompts.append(tokens.encode(text[: at + len(ANSWER)]))
            at = text.find(ANSWER, at + 1)
    return prompts


def prose_prompts(tokens: Tokens, count: int, length: int = 64) -> list[list[int]]:
    """`count` pieces of prose of `length` tokens, evenly apart."""
    ids = tokens.encode(prose())
    step = (len(ids) - length) // count
    return [ids[i * step : i * step + length] for i in range(count)]
