"""The memory plan: how many slots fit, and how large the page pool may become."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata_native import ffi, lib

MIB = 1 << 20
TINY = {
    "weights": 34 * MIB,
    "slot_fixed": 3 * MIB,
    "block": 33 << 10,
    "draft_block": 8 << 10,
    "slots": 8,
    "max_context": 4096,
}


def plan(**values: int) -> Any:
    """The plan; TINY's values unless named."""
    given_in = ffi.new("st_plan_in *", {**TINY, **values})
    out = ffi.new("st_plan_out *")
    assert lib.st_plan_memory(given_in, out) == out.slots
    return out


def test_without_a_limit_every_slot_gets_a_whole_context() -> None:
    out = plan()
    assert (out.slots, out.blocks) == (8, 9 * 64)  # GEN's slot too


@pytest.mark.parametrize("slots", [1, 2, 63, 64])
def test_as_many_slots_as_are_wanted_where_there_is_room(slots: int) -> None:
    assert plan(slots=slots, budget=1 << 40).slots == slots


def test_fewer_slots_where_there_is_not() -> None:
    fit = [plan(slots=64, budget=mib * MIB).slots for mib in (40, 45, 60, 100, 200, 400)]
    assert fit[0] == 0
    assert fit == sorted(fit)
    assert 0 < fit[2] < fit[4] < 64


def test_the_pool_holds_a_whole_context_and_a_block_for_each_slot_at_least() -> None:
    out = next(plan(slots=4, budget=b * MIB) for b in range(30, 200) if plan(slots=4, budget=b * MIB).slots == 4)
    assert 64 + 4 <= out.blocks < 2 * 64


INPUTS = {
    "budget": st.one_of(st.just(0), st.integers(1, 1 << 42)),
    "weights": st.integers(0, 1 << 40),
    "buffers": st.integers(0, 1 << 32),
    "prompt_cache": st.integers(0, 1 << 36),
    "slot_fixed": st.integers(0, 1 << 33),
    "block": st.integers(64, 1 << 26),
    "draft_block": st.integers(0, 1 << 22),
    "slots": st.integers(1, 64),
    "max_context": st.integers(1, 1 << 30),
}


@given(st.fixed_dictionaries(INPUTS), st.integers(0, 1 << 40))
def test_never_over_the_budget_never_more_than_asked_for_and_more_memory_never_fits_less(
    values: dict[str, int], more: int
) -> None:
    out = plan(**values)
    whole = -(-values["max_context"] // 64)
    assert 0 <= out.slots <= values["slots"]
    if not out.slots:
        assert values["budget"]
        assert (out.blocks, out.fixed, out.pool, out.total) == (0, 0, 0, 0)
        return
    assert min(whole + out.slots, 1 << 30) <= out.blocks <= whole * (out.slots + 1)
    base = values["weights"] + values["buffers"] + values["prompt_cache"]
    assert out.total == base + out.fixed + out.pool
    if values["budget"]:
        assert out.total <= values["budget"]
        richer = plan(**{**values, "budget": values["budget"] + more})
        assert richer.slots >= out.slots
        assert richer.slots > out.slots or richer.blocks >= out.blocks
    fewer = plan(**{**values, "slots": 1})
    assert fewer.slots == 1  # who fits in company fits alone
