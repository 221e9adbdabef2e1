"""Drafts never change an answer: off, of any fixed depth, under any rule, or as the controller likes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.exactness.slots import HIDDEN, Request, Stream
from tests.exactness.worlds import World

SLOW = pytest.mark.slow


def four(world: World, *args: str | float, env: dict[str, str] | None = None, **keys: Any) -> list[Stream]:
    """Four conversations beside one another, and one in GEN; each must say what it says alone."""
    rng = random.Random(11)
    with world.slots("--parallel", 4, *args, env=env) as slots:
        for i, req in enumerate(world.requests(rng, 5, 100)):
            slots.begin(i - 1, Request(req.ids, req.max_new, (*req.keys, *keys.items())))
        streams = list(slots.running.values())
        slots.finish()
    world.oracle.check(*streams)
    return streams


def offered(streams: list[Stream]) -> tuple[int, int]:
    """Drafts offered and accepted."""
    return sum(int(s.done["offered"]) for s in streams), sum(int(s.done["accepted"]) for s in streams)


@pytest.fixture(params=["moe", pytest.param("embedded", marks=SLOW)])
def drafting(request: pytest.FixtureRequest) -> World:
    """The worlds whose models have a drafter."""
    world: World = request.getfixturevalue(request.param)
    return world


@pytest.mark.parametrize("depth", range(1, 9))
def test_any_fixed_depth(drafting: World, depth: int) -> None:
    n, right = offered(four(drafting, "--spec", depth, "--spec-fixed", "--spec-min-p", 0))
    assert n > 100 * depth
    assert 0 < right < n  # some of them right and some wrong: both ways were gone


def test_no_drafts(drafting: World) -> None:
    assert offered(four(drafting, "--spec", 0)) == (0, 0)
    assert offered(four(drafting, "--spec", 3, "--spec-fixed", spec_min_p=1)) == (0, 0)


@pytest.mark.parametrize("min_p", [0, 0.1, 0.5, 0.9])
def test_a_least_probability(drafting: World, min_p: float) -> None:
    few = offered(four(drafting, "--spec", 5, "--spec-fixed", "--spec-min-p", min_p))[0]
    again = offered(four(drafting, "--spec", 5, "--spec-fixed", "--spec-min-p", 0, spec_min_p=min_p))[0]
    assert few == again  # an option and a request's key are one rule


@pytest.mark.parametrize("rule", ["0.2", "0.05,0.4", "0.02,0.6,20,150"])
def test_the_product_rule(drafting: World, rule: str) -> None:
    args = ("--spec", 6, "--spec-fixed", "--spec-min-p", 0)
    most = offered(four(drafting, *args))[0]
    some = offered(four(drafting, *args, env={"STRATA_SPEC_PCUM": rule}))[0]
    assert 0 < some < most
    if rule == "0.2":
        assert offered(four(drafting, *args, spec_p_cum=0.2))[0] == some


def test_the_product_rule_of_a_request(drafting: World) -> None:
    four(drafting, "--spec", 6, "--spec-fixed", "--spec-min-p", 0, spec_p_cum=0.02, spec_p_cum_deep=0.5)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_the_controller(drafting: World, most: int) -> None:
    four(drafting, "--spec", most, "--spec-min-p", 0, "--batch-mtp")


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_drafts_in_windows_larger_than_a_chunk(drafting: World, chunk: int) -> None:
    """Every slot brings nine rows and more are read beside them: the scratch of a window must hold them all."""
    four(drafting, "--spec", 8, "--spec-fixed", "--spec-min-p", 0, "--chunk", chunk)


def test_drafts_alone_in_gen(drafting: World) -> None:
    rng = random.Random(12)
    with drafting.slots("--spec", 8, "--spec-fixed", "--spec-min-p", 0, "--chunk", 1) as slots:
        for req in drafting.requests(rng, 4, 60):
            drafting.oracle.check(slots.run(HIDDEN, req))
