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
from tests.native.tiny_models import BY_NAME, MODELS, WIDE_MODELS, Tiny, sample_ids, write

Array = npt.NDArray[Any]
TRANSFORMERS = json.loads(Path(__file__).with_name("transformers_reference.json").read_text())["models"]
EXACT = 1e-4  # largest |logit error| by the standard deviation of the logits; 1.5e-5 is found
TRANSFORMERS_EXACT = 2e-5  # it computes in float32 itself; 5e-6 is found
ISAS = ("avx512", "avxvnni", "avx2", "scalar")

# The loss of a row is the root mean square of its logit errors by the standard deviation of all logits. Bounds are on
# the median row, about 1.4 times the largest found. With float32 weights, by architecture and type of keys and values:
LOSS = {
    ("llama", "f16"): 7e-4,
    ("llama", "int8"): 2.5e-2,
    ("qwen35moe", "f16"): 1.2e-4,
    ("qwen35moe", "int8"): 5e-3,
}
# With weights of any other type activations are int8, and that is what costs: 2.5e-2 to 4.6e-2, whatever the type.
# F16 and BF16 are rounded to Q8_0 besides: up to 6.7e-2.
LOSS_QUANTISED = 6e-2
LOSS_HALF = 9e-2
HALVES = ("F16", "BF16")
SMALL_BLOCKS = (*HALVES, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
SUPER_BLOCKS = ("Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class Case:
    """A model file, a token sequence, and what the reference says of it."""

    model: Tiny
    path: Path
    ids: list[int]
    expected: Array

    def engine(self, kv: str, ids: Sequence[int] | None = None, **options: Any) -> Array:
        with Evaluator(self.path, kv=kv, **{"threads": 1, **options}) as engine:
            return engine.logits(self.ids if ids is None else ids)

    def worst(self, logits: Array) -> float:
        return float(np.abs(logits - self.expected).max() / self.expected.std())

    def loss(self, logits: Array) -> float:
        return float(np.median(np.sqrt(np.square(logits - self.expected).mean(1))) / self.expected.std())


Make = Callable[..., Case]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Cases by model, weight type and length, each made once."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[tuple[str, str, int], Case] = {}

    def make(model: Tiny, kind: str = "F32", length: int = 100) -> Case:
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


@pytest.mark.parametrize("model", (*MODELS, *WIDE_MODELS), ids=str)
def test_float_forms_compute_the_same_function(case: Make, model: Tiny) -> None:
    found = case(model)
    assert found.worst(found.engine("f32")) <= EXACT


@pytest.mark.parametrize("name", ["llama-64", "qwen35moe-64"])
def test_they_do_over_many_blocks_and_spans(case: Make, name: str) -> None:
    """Attention folds blocks of 64 positions into spans of 512: two spans and a part of a third."""
    found = case(BY_NAME[name], length=1100)
    assert found.worst(found.engine("f32")) <= EXACT


@pytest.mark.parametrize(("arch", "kv"), LOSS)
def test_what_other_keys_and_values_lose(case: Make, arch: str, kv: str) -> None:
    for model in MODELS:
        if model.arch == arch:
            found = case(model)
            assert found.loss(found.engine(kv)) <= LOSS[arch, kv], model


@pytest.mark.parametrize("kind", [*SMALL_BLOCKS, *SUPER_BLOCKS])
def test_what_other_weights_lose(case: Make, kind: str) -> None:
    """Measured against the values that the file holds: what is lost is lost by the engine. Out of the mapped file the
    bits are the same."""
    for model in WIDE_MODELS if kind in SUPER_BLOCKS else MODELS:
        found = case(model, kind)
        logits = found.engine("int8")
        assert found.loss(logits) <= (LOSS_HALF if kind in HALVES else LOSS_QUANTISED), model
        assert found.engine("int8", weights="mapped").tobytes() == logits.tobytes(), model


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_half_weights_as_they_are_lose_nothing(case: Make, model: Tiny, kind: str) -> None:
    found = case(model, kind)
    assert found.worst(found.engine("f32", dense="as-is")) <= EXACT


# ---- one answer, whatever computes it ----------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["f16", "f32"])
@pytest.mark.parametrize("name", ["llama-32", "qwen35moe-64"])
def test_float_keys_and_values_give_the_same_bits_everywhere(case: Make, name: str, kv: str) -> None:
    """On every instruction set, thread count and cut of the sequence."""
    found = case(BY_NAME[name], "Q8_0")
    expected = found.engine(kv, isa="scalar", threads=1)
    for isa in ISAS:
        if lib.st_kernels_find(isa.encode(), ffi.NULL) != ffi.NULL:
            for threads, max_rows in ((1, 1), (2, 7), (2, 4096)):
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
        for first in (1, 15, 16, 70, len(found.ids) - 1):
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
