"""Fixtures of the room of exactness: worlds. The random models are fast, the embedded one is what is shipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.exactness import models
from tests.exactness.slots import Oracle
from tests.exactness.worlds import World
from tests.native.driver import MODEL


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Random: recurrent and attention layers, experts, a drafter that is right now and then."""
    path = models.moe(tmp_path_factory.mktemp("moe") / "moe.gguf")
    with closing(Oracle(path)) as oracle:
        yield World("moe", path, oracle, 61, models.TURN, (models.END, models.TEXT_END), 8192, (0, 0, 0.5, 1, 2))


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Random: attention only, so that sessions can be cut; no drafter and no marks."""
    path = models.llama(tmp_path_factory.mktemp("llama") / "llama.gguf")
    with closing(Oracle(path)) as oracle:
        yield World("dense", path, oracle, 528, 0, (), 8192, (0, 0.5, 1))


@pytest.fixture(scope="session")
def embedded() -> Iterator[World]:
    """The embedded model. It is so sure of itself that little below a temperature of 6 makes it waver."""
    with closing(Oracle(MODEL)) as oracle:
        yield World("embedded", MODEL, oracle, 8000, 8186, (8185, 8187), 4096, (0, 0, 1, 6))


@pytest.fixture(params=["moe", "dense", pytest.param("embedded", marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest) -> World:
    """Each of them."""
    found: World = request.getfixturevalue(request.param)
    return found
