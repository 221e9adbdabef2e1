"""The embedded model's vocabulary and template, read once."""

from __future__ import annotations

from pathlib import Path

import pytest
from stratad.model_file import Model, load_model
from stratad.template import ChatTemplate
from stratad.tokens import Tokens

MODELS = Path(__file__).parents[2] / "native" / "models"
GGUF_FILE = MODELS / "strata-tiny-moe-Q4_0.gguf"
REFERENCE = MODELS / "reference_Q4_0.json"


@pytest.fixture(scope="session")
def model() -> Model:
    """The embedded model as the daemon sees it."""
    return load_model(GGUF_FILE)


@pytest.fixture(scope="session")
def tokens(model: Model) -> Tokens:
    """Its tokenizer."""
    return model.tokens


@pytest.fixture(scope="session")
def template(model: Model) -> ChatTemplate:
    """Its chat template."""
    assert model.template is not None
    return model.template
