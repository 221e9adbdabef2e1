"""How often the engine's most probable token is llama.cpp's, along a text of llama.cpp's.

    python -m tests.native.llama_agreement [MODEL.gguf ...]

For each of 20 prompts llama-server (STRATA_BENCH_PEER names its folder) writes 64 tokens greedily; the engine is given
the same tokens and asked at each of them. Both quantise activations and neither is exact, so tokens that llama.cpp
itself holds for almost equal may differ: what counts are those where its first is 0.5 nat ahead of its second. There
the two must agree in 99 of 100.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from strata_native.errors import StrataNativeError
from strata_native.evaluate import Evaluator
from stratad.tokens import Tokens, VocabularyError

from tests.bench.engine import BenchError
from tests.bench.peer import find_peer
from tests.bench.servers import Server, peer_server
from tests.native.driver import MODEL
from tests.native.texts import answer_prompts, prose_prompts, tokens_of

PROMPTS = 20
TOKENS = 64
CLEAR_GAP = 0.5  # nats between llama.cpp's first and second token
REQUIRED = 0.99
CONTEXT = 2048
REPLY_S = 900  # the peer's threads spin: on a busy machine it takes minutes for what takes a second


@dataclass(frozen=True)
class Step:
    """One position of the peer's text."""

    token: int  # what it wrote
    first: int  # its most probable token (another one where it was kept from ending)
    gap: float  # nats to its second
    log_prob: float  # of `first`


@dataclass(frozen=True)
class Agreement:
    """Over all positions: how many, how many of them clear, and where the engine says the same."""

    positions: int
    equal: int
    clear: int
    clear_equal: int
    log_prob_error: float  # median |difference| of log-probabilities of the peer's first token
    worst_clear_gap: float  # the largest gap of the peer where the engine differs

    @property
    def holds(self) -> bool:
        return self.clear_equal >= REQUIRED * self.clear

    def __str__(self) -> str:
        return (
            f"{self.clear_equal}/{self.clear} = {self.clear_equal / self.clear:.4f} equal where the gap exceeds "
            f"{CLEAR_GAP} nat; {self.equal}/{self.positions} = {self.equal / self.positions:.4f} of all; "
            f"median log-prob difference {self.log_prob_error:.4f}; widest gap that differs {self.worst_clear_gap:.2f}"
        )


def write_on(server: Server, prompt: Sequence[int]) -> list[Step]:
    """64 greedy tokens of the peer behind a prompt, with its raw log-probabilities."""
    body = {
        "prompt": list(prompt),
        "n_predict": TOKENS,
        "temperature": 0.0,
        "n_probs": 4,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REPLY_S) as reply:
        answer: dict[str, Any] = json.load(reply)
    steps = []
    for entry in answer["completion_probabilities"]:
        top = entry["top_logprobs"]
        steps.append(Step(entry["id"], top[0]["id"], top[0]["logprob"] - top[1]["logprob"], top[0]["logprob"]))
    return steps


def prompts_of(tokens: Tokens) -> list[list[int]]:
    """Twenty prompts that suit the model: conversations where it knows their form, else prose."""
    if tokens.count("<think>") != 1:
        return prose_prompts(tokens, PROMPTS)
    every = answer_prompts(tokens)
    return [every[i * len(every) // PROMPTS] for i in range(PROMPTS)]


def measure(model: Path, server: Server, kv: str = "int8") -> Agreement:
    """The agreement on one model; `server` runs the same file."""
    tokens = tokens_of(model)
    equal, gaps, errors = [], [], []
    with Evaluator(model, kv=kv, threads=2) as engine:
        for prompt in prompts_of(tokens):
            steps = write_on(server, prompt)
            ids = [*prompt, *(s.token for s in steps[:-1])]
            rows = engine.logits(ids, len(prompt) - 1).astype(np.float64)
            top = rows.max(1)
            own = (
                rows[np.arange(len(rows)), [s.first for s in steps]] - top - np.log(np.exp(rows - top[:, None]).sum(1))
            )
            equal += [bool(a == s.first) for a, s in zip(rows.argmax(1), steps, strict=True)]
            gaps += [s.gap for s in steps]
            errors += [abs(a - s.log_prob) for a, s in zip(own, steps, strict=True)]
    same, gap = np.array(equal), np.array(gaps)
    clear = gap > CLEAR_GAP
    worst = float(gap[~same].max(initial=0.0))
    return Agreement(
        len(same), int(same.sum()), int(clear.sum()), int(same[clear].sum()), float(np.median(errors)), worst
    )


def main() -> int:
    """Measure the models named, or the embedded one; 1 when one agrees too seldom, 2 when nothing is measured."""
    try:
        return compare([Path(a) for a in sys.argv[1:]] or [MODEL])
    except (BenchError, StrataNativeError, VocabularyError, OSError) as error:
        print(f"llama_agreement: {error}", file=sys.stderr)
        return 2


def compare(models: Sequence[Path]) -> int:
    peer = find_peer(os.environ)
    if peer is None:
        raise BenchError("no peer: set STRATA_BENCH_PEER to a folder with llama-server")
    failed = False
    for model in models:
        with peer_server(peer, model, 2, 1, CONTEXT) as server:
            result = measure(model, server)
        print(f"{model.name}: {result}", flush=True)
        failed = failed or not result.holds
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
