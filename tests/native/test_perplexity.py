"""Perplexity on committed texts: the engine's, as it runs, against the float model of the same values.

`data/perplexity.json` holds the float model's mean loss (numpy, `python -m tests.native.test_perplexity` makes it
again), so that the ordinary run only has the engine's to compute. A model that the table does not know is measured
against numpy itself in the slow tests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from strata_native.evaluate import Evaluator
from stratad.tools.fetch import MODELS, cache_folder, fetch

from tests.native.driver import MODEL
from tests.native.numpy_reference import Reference
from tests.native.requantize import requantize
from tests.native.texts import DATA, dialogues, mean_loss, prose_windows, tokens_of

KNOWN = DATA / "perplexity.json"
REQUIRED = 0.01  # perplexity may differ by 1 %
FOUND = 0.002  # on the embedded model it differs by less than 0.03 %
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")  # its rows are 64 and 384 wide


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    tokens = tokens_of(MODEL)
    return [tokens.encode(text) for text in dialogues()]


def engine_loss(model: Path, documents: Sequence[Sequence[int]], kv: str) -> float:
    with Evaluator(model, kv=kv) as engine:
        return mean_loss(engine.logits, documents)


def difference(loss: float, reference: float) -> float:
    """Of the perplexities, as a share of the reference's."""
    return abs(float(np.expm1(loss - reference)))


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_the_embedded_model_loses_next_to_nothing(documents: list[list[int]], kv: str) -> None:
    reference = json.loads(KNOWN.read_text())[MODEL.name]["dialogues"]
    assert difference(engine_loss(MODEL, documents, kv), reference) < FOUND


def test_the_measure_notices_a_worse_model(documents: list[list[int]]) -> None:
    """Two tokens exchanged in the texts cost more than the tolerance."""
    broken = [[*ids[:40], ids[41], ids[40], *ids[42:]] for ids in documents]
    reference = json.loads(KNOWN.read_text())[MODEL.name]["dialogues"]
    assert difference(engine_loss(MODEL, broken, "int8"), reference) > REQUIRED


@pytest.mark.slow
def test_the_known_value_is_what_numpy_says(documents: list[list[int]]) -> None:
    known = json.loads(KNOWN.read_text())[MODEL.name]["dialogues"]
    assert abs(mean_loss(Reference(MODEL, np.float32).logits, documents) - known) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_type_is_close_to_its_float_model(tmp_path: Path, documents: list[list[int]], kind: str) -> None:
    path = tmp_path / f"{kind}.gguf"
    requantize(MODEL, path, kind)
    some = documents[::4]
    reference = mean_loss(Reference(path, np.float32).logits, some)
    assert difference(engine_loss(path, some, "int8"), reference) < REQUIRED


@pytest.mark.slow
def test_smollm2_on_prose() -> None:
    """The other real model, where it has been fetched (`python -m stratad.tools.fetch smollm2`)."""
    model = cache_folder() / MODELS["smollm2"].file_name
    if not model.exists():
        pytest.skip(f"{model} has not been fetched")
    reference = json.loads(KNOWN.read_text())[model.name]["prose"]
    assert difference(engine_loss(model, prose_windows(tokens_of(model)), "int8"), reference) < REQUIRED


def main() -> None:
    """Write what the float model says of both real models' files."""
    tokens = tokens_of(MODEL)
    loss = mean_loss(Reference(MODEL, np.float32).logits, [tokens.encode(text) for text in dialogues()])
    other = fetch(MODELS["smollm2"], cache_folder())
    other_loss = mean_loss(Reference(other, np.float32).logits, prose_windows(tokens_of(other)))
    known = {MODEL.name: {"dialogues": round(loss, 7)}, other.name: {"prose": round(other_loss, 7)}}
    KNOWN.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
