"""The engine's logits against what shares nothing with it: float64 numpy, and transformers' word on the same weights.

With keys and values and weights in float32 both compute the same function, and only rounding is between them. The other
forms lose something; how much, on these random models, is written down here. Random weights are the hard case: nothing
in them damps an error, and an expert that is chosen otherwise changes a row for good.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from strata_native import ffi, lib
from strata_native.errors import StrataNativeError
from strata_native.evaluate import Evaluator

from tests.native.driver import Engine
from tests.native.numpy_reference import Reference, log_softmax
from tests.native.tiny_models import BY_NAME, MODELS, Tiny, sample_ids, write

Array = npt.NDArray[Any]
TRANSFORMERS = json.loads(Path(__file__).with_name("transformers_reference.json").read_text())["models"]
EXACT = 1e-4  # largest |logit error| by the standard deviation of the logits; 1.5e-5 is found
TRANSFORMERS_EXACT = 2e-5  # it computes in float32 itself; 5e-6 is found
ISAS = ("avx512", "avx2", "scalar")

# Root mean square of the logit error by the standard deviation of the logits: about 1.4 times the largest found.
LOSS = {
    ("llama", "F32", "f16"): 8e-4,
    ("llama", "F32", "int8"): 2.8e-2,
    ("llama", "Q8_0", "f32"): 4e-2,
    ("llama", "Q8_0", "int8"): 5e-2,
    ("llama", "Q4_0", "f32"): 4e-2,
    ("llama", "Q4_0", "int8"): 5e-2,
    ("qwen35moe", "F32", "f16"): 1.5e-4,
    ("qwen35moe", "F32", "int8"): 2e-2,
    ("qwen35moe", "Q8_0", "f32"): 9e-2,
    ("qwen35moe", "Q8_0", "int8"): 9e-2,
    ("qwen35moe", "Q4_0", "f32"): 8e-2,
    ("qwen35moe", "Q4_0", "int8"): 8e-2,
}


@dataclass(frozen=True)
class Case:
    """A model file, a token sequence, and what the reference says of it."""

    model: Tiny
    path: Path
    ids: list[int]
    expected: Array

    def engine(self, kv: str, ids: Sequence[int] | None = None, **options: Any) -> Array:
        with Evaluator(self.path, kv=kv, **options) as engine:
            return engine.logits(self.ids if ids is None else ids)

    def worst(self, logits: Array) -> float:
        return float(np.abs(logits - self.expected).max() / self.expected.std())

    def rms(self, logits: Array) -> float:
        return float(np.sqrt(np.square(logits - self.expected).mean()) / self.expected.std())


Make = Callable[..., Case]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Cases by model, weight type and length, each made once."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[tuple[str, str, int], Case] = {}

    def make(model: Tiny, kind: str = "F32", length: int = 150) -> Case:
        key = model.name, kind, length
        if key not in made:
            path = folder / f"{model}-{kind}.gguf"
            if not path.exists():
                write(model, path, kind)
            ids = sample_ids(model, length)
            made[key] = Case(model, path, ids, Reference(path).logits(ids))
        return made[key]

    return make


# ---- the references agree with each other ------------------------------------------------------------------------


def check_against_transformers(said: dict[str, Any], logits: Array) -> None:
    log_probs = log_softmax(logits.astype(np.float64))
    assert logits.argmax(1).tolist() == said["argmax"]
    for row in said["rows"]:
        at = row["position"]
        for token, value in row["logits"].items():
            assert abs(logits[at, int(token)] - value) <= TRANSFORMERS_EXACT * said["std"]
        for token, value in row["log_probs"].items():
            assert abs(log_probs[at, int(token)] - value) <= TRANSFORMERS_EXACT * said["std"]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_numpy_reference_says_what_transformers_says(case: Make, name: str) -> None:
    said = TRANSFORMERS[name]
    check_against_transformers(said, Reference(case(BY_NAME[name]).path).logits(said["ids"]))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_engine_says_what_transformers_says(case: Make, name: str) -> None:
    said = TRANSFORMERS[name]
    check_against_transformers(said, case(BY_NAME[name]).engine("f32", said["ids"]))


# ---- the engine against the reference ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_float_forms_compute_the_same_function(case: Make, model: Tiny) -> None:
    found = case(model)
    assert found.worst(found.engine("f32")) <= EXACT


@pytest.mark.parametrize("name", ["llama-64", "qwen35moe-64"])
def test_they_do_over_many_blocks_and_spans(case: Make, name: str) -> None:
    """Attention folds blocks of 64 positions into spans of 512: two spans and a part of a third."""
    found = case(BY_NAME[name], length=1100)
    assert found.worst(found.engine("f32")) <= EXACT


@pytest.mark.parametrize(("arch", "kind", "kv"), LOSS)
def test_what_the_other_forms_lose(case: Make, arch: str, kind: str, kv: str) -> None:
    """Measured against the values that the file holds: what is lost is lost by the engine."""
    for model in MODELS:
        if model.arch == arch:
            found = case(model, kind)
            assert found.rms(found.engine(kv)) <= LOSS[arch, kind, kv], model


# ---- one answer, whatever computes it ----------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["f16", "f32"])
@pytest.mark.parametrize("name", ["llama-32", "qwen35moe-64"])
def test_float_keys_and_values_give_the_same_bits_everywhere(case: Make, name: str, kv: str) -> None:
    """On every instruction set, thread count and cut of the sequence."""
    found = case(BY_NAME[name], "Q8_0")
    expected = found.engine(kv, isa="scalar", threads=1)
    for isa in ISAS:
        if lib.st_kernels_find(isa.encode(), ffi.NULL) != ffi.NULL:
            for threads, max_rows in ((1, 1), (2, 7), (3, 4096)):
                got = found.engine(kv, isa=isa, threads=threads, max_rows=max_rows)
                assert got.tobytes() == expected.tobytes(), (isa, threads, max_rows)


def test_the_types_are_identities_of_their_own(case: Make) -> None:
    """The engine names the type it runs, and no two types share pages."""
    found = case(MODELS[0])
    identities = set()
    for kv in ("int8", "f16", "f32"):
        with Engine("--kv", kv, "--threads", "1", model=found.path) as engine:
            assert engine.info["kv"] == kv
            identities.add(engine.info["identity"])
            token = engine.generate(found.ids[:40], 1).tokens[0]
            assert token == int(found.expected[39].argmax())
    assert len(identities) == 3


def test_the_engine_and_the_evaluator_give_the_same_numbers(case: Make) -> None:
    found = case(BY_NAME["qwen35moe-32"])
    logits = found.engine("f32", found.ids[:30], threads=1)[-1].astype(np.float64)
    with Engine("--kv", "f32", "--threads", "1", model=found.path) as engine:
        top = engine.generate(found.ids[:30], 1, logprobs=20).tops[0]
    expected = log_softmax(logits)
    assert len(top) == 20
    assert all(abs(expected[i] - lp) < 1e-6 for i, lp in top.items())


# ---- the evaluator's manners ---------------------------------------------------------------------------------------


def test_wanted_rows_are_a_part_of_all_rows(case: Make) -> None:
    found = case(MODELS[0])
    with Evaluator(found.path, threads=1, max_rows=16) as engine:
        every = engine.logits(found.ids)
        assert (engine.vocab, engine.context) == (found.model.vocab, found.model.context)
        for first in (1, 15, 16, 100, len(found.ids) - 1):
            assert engine.logits(found.ids, first).tobytes() == every[first:].tobytes()
        assert engine.logits(found.ids, len(found.ids)).shape == (0, found.model.vocab)


@pytest.mark.parametrize(
    ("ids", "first", "name"),
    [
        ([], 0, "context_full"),
        ([1] * 2049, 0, "context_full"),
        ([1, -1], 0, "token_range"),
        ([1, 528], 0, "token_range"),
        ([1, 2], 3, "bad_range"),
        ([1, 2], -1, "bad_range"),
    ],
)
def test_what_it_refuses(case: Make, ids: list[int], first: int, name: str) -> None:
    found = case(MODELS[0])
    with Evaluator(found.path, threads=1) as engine:
        with pytest.raises(StrataNativeError) as refused:
            engine.logits(ids, first)
        assert refused.value.name == name
        assert engine.logits(found.ids[:5]).tobytes() == engine.logits(found.ids[:5]).tobytes()


@pytest.mark.parametrize("options", [{"max_rows": -1}, {"max_rows": 4097}, {"threads": -1}, {"isa": "sse9"}])
def test_options_out_of_range(case: Make, options: dict[str, Any]) -> None:
    with pytest.raises(StrataNativeError) as refused:
        Evaluator(case(MODELS[0]).path, **options)
    assert refused.value.name == "usage"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StrataNativeError) as refused:
        Evaluator(tmp_path / "none.gguf")
    assert refused.value.name == "model_open"
