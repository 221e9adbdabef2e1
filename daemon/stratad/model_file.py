"""What the daemon itself needs of the model file: names, tokens, chat template, recommended sampling.

Weights are the engine's business; here only the metadata is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratad.errors import StrataError
from stratad.template import ChatTemplate
from stratad.tokens import Tokens

log = logging.getLogger(__name__)

RECOMMENDED: dict[str, str] = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
    "penalty_last_n": "general.sampling.penalty_last_n",
}
"""Request parameter -> GGUF key under which a file recommends a value."""


@dataclass(frozen=True)
class Model:
    """A model as clients see it. `template` is None for a file without one, or with one that does not compile."""

    name: str
    created: int  # seconds since 1970: the file's modification time
    tokens: Tokens
    template: ChatTemplate | None
    recommended: Mapping[str, float]
    trained_context: int


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata of a GGUF file. Raises ValueError for a bad file."""
    from strata_native.errors import StrataNativeError
    from strata_native.gguf import GGUF

    try:
        with GGUF(path) as file:
            return dict(file.metadata)
    except StrataNativeError as error:
        raise ValueError(str(error)) from None


def load_model(path: Path, name: str = "") -> Model:
    """Read what the daemon needs of `path`; seconds of work for a large vocabulary, so run it off the loop.

    `name` is what clients call the model; empty means the file's stem. Raises ValueError or OSError, naming the
    field that is wrong.
    """
    return model_from_metadata(read_metadata(path), name or path.stem, int(path.stat().st_mtime))


def model_from_metadata(metadata: Mapping[str, Any], name: str, created: int) -> Model:
    """`load_model` for metadata that has been read already. Raises VocabularyError."""
    tokens = Tokens(metadata)
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length", 0)
    return Model(
        name=name,
        created=created,
        tokens=tokens,
        template=_template(metadata.get("tokenizer.chat_template"), tokens),
        recommended={
            parameter: metadata[key]
            for parameter, key in RECOMMENDED.items()
            if isinstance(metadata.get(key), int | float) and not isinstance(metadata.get(key), bool)
        },
        trained_context=context if isinstance(context, int) else 0,
    )


def _template(source: object, tokens: Tokens) -> ChatTemplate | None:
    if not isinstance(source, str) or not source:
        log.warning("the model file has no chat template: only /v1/completions will answer")
        return None
    try:
        return ChatTemplate(source, tokens)
    except StrataError as error:
        log.warning("%s: only /v1/completions will answer", error.message)
        return None
