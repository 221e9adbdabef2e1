"""What the daemon reads of a model file."""

from __future__ import annotations

from pathlib import Path

import pytest
from stratad.model_file import load_model, model_from_metadata

from tests.daemon.conftest import GGUF_FILE
from tests.daemon.test_tokens import metadata


def test_the_embedded_model() -> None:
    model = load_model(GGUF_FILE)
    assert model.name == "strata-tiny-moe-Q4_0"
    assert model.created == int(GGUF_FILE.stat().st_mtime)
    assert (model.trained_context, model.tokens.size) == (4096, 8192)
    assert model.template is not None
    assert model.recommended == {}
    assert load_model(GGUF_FILE, "other").name == "other"


def test_recommended_sampling_is_read_and_nonsense_left_out() -> None:
    keys = {"temp": 0.6, "top_k": 20, "top_p": "much", "min_p": True}
    facts = metadata() | {f"general.sampling.{name}": value for name, value in keys.items()}
    assert model_from_metadata(facts, "m", 0).recommended == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(("source", "words"), [(None, "no chat template"), ("\n{% if %}", "line 2")])
def test_without_a_usable_template_there_is_a_warning(
    source: str | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    facts = metadata() | ({"tokenizer.chat_template": source} if source else {})
    assert model_from_metadata(facts, "m", 0).template is None
    assert words in caplog.text and "/v1/completions" in caplog.text


def test_a_file_that_is_none_is_an_error_with_its_name(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"bad\.gguf"):
        load_model(bad)
    with pytest.raises((ValueError, OSError), match=r"none\.gguf"):
        load_model(tmp_path / "none.gguf")
