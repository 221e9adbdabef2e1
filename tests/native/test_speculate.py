"""The draft rules, and the controller that decides how deep to draft: simulated machines, drafters and slots."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from strata_native import ffi, lib

DEPTHS = 8
NEARLY = 0.97  # of what the best fixed depth brings


# ---- rules -----------------------------------------------------------------------------------------------------


def parse(text: str) -> Any:
    rule, err = ffi.new("st_spec_rule *"), ffi.new("st_error *")
    if lib.st_spec_parse(text.encode(), rule, err):
        raise ValueError(ffi.string(err.name).decode(), ffi.string(err.text).decode())
    return rule


def test_the_product_rule_goes_from_base_to_deep() -> None:
    rule = parse("0.6,0.2,100,300")
    at = [lib.st_spec_threshold(rule, n) for n in (0, 100, 150, 200, 250, 300, 100000)]
    assert at == pytest.approx([0.6, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2])


def test_deep_defaults_to_base_and_positions_to_those_of_long_contexts() -> None:
    assert {round(lib.st_spec_threshold(parse("0.7"), n), 6) for n in (0, 20000, 50000)} == {0.7}
    rule = parse("0.8,0.4")
    assert (rule.deep_from, rule.deep_at) == (16384, 49152)
    assert lib.st_spec_threshold(rule, 32768) == pytest.approx(0.6)


def test_no_rule_has_no_threshold() -> None:
    assert lib.st_spec_threshold(parse("0"), 5) == 0
    assert lib.st_spec_threshold(ffi.new("st_spec_rule *"), 5) == 0


@pytest.mark.parametrize(
    "text",
    ["", "x", "0.5,", "0.5,0.2,", "0.5,0.2,10", "0.5,0.2,10,", "0.5,0.2,10,5", "1.5", "-0.1", "nan", "0.5 ", "0.5,2"],
)
def test_a_malformed_rule_is_refused_with_what_is_wanted(text: str) -> None:
    with pytest.raises(ValueError, match=r"base\[,deep\[,d0,d1\]\]") as caught:
        parse(text)
    assert caught.value.args[0] == "usage"


# ---- the controller, on simulated machines -----------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What a window of so many rows and a pass of the drafter cost, in ms."""

    window: Callable[[int], float]
    draft: float


MACHINES = {
    "one row as dear as the next": Machine(lambda r: 2.0 * r, 0.3),
    "rows are cheap": Machine(lambda r: 10 + 0.2 * r, 0.3),
    "a little of each": Machine(lambda r: 3 + 1.0 * r, 0.4),
    "four rows cost 2.8": Machine(lambda r: 0.8 + 1.2 * r if r > 1 else 2.0, 0.2),
    "a step behind four rows": Machine(lambda r: 2 + 0.2 * r if r <= 4 else 6 + 0.3 * r, 0.2),
    "tiles of eight": Machine(lambda r: 1 + 3.0 * -(-r // 8), 0.15),
    "a dear drafter": Machine(lambda r: 5 + 0.5 * r, 4.0),
}
TEXTS = {
    "predictable": [0.98] * DEPTHS,
    "good at first": [0.95, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.1],
    "so so": [0.6] * DEPTHS,
    "poor": [0.25, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
    "hopeless": [0.0] * DEPTHS,
}


def expected_tokens(right: Sequence[float], depth: int) -> float:
    tokens = chance = 1.0
    for p in right[:depth]:
        chance *= p
        tokens += chance
    return tokens


def best_fixed(machine: Machine, right: Sequence[float], slots: int, most: int) -> tuple[float, int]:
    """Tokens per ms of the best fixed depth, and that depth."""
    return max(
        (slots * expected_tokens(right, k) / (machine.window(slots * (1 + k)) + k * machine.draft), k)
        for k in range(most + 1)
    )


def choose(cost: Any, slots: Sequence[Any], most: Sequence[int]) -> list[int]:
    """How deep each slot drafts."""
    depth = ffi.new("int[]", len(slots) + 1)
    lib.st_spec_depths(cost, ffi.new("st_acceptance *[]", [*slots, ffi.NULL]), [*most, 0], len(slots), depth)
    return list(depth)[:-1]


class Simulation:
    """An engine whose windows cost what the machine says, give or take."""

    def __init__(self, slots: int, seed: int = 0, most: int = DEPTHS) -> None:
        self.rng = random.Random(seed)
        self.cost = ffi.new("st_spec_cost *")
        self.slots = [ffi.new("st_acceptance *") for _ in range(slots)]
        self.most = most
        for slot in self.slots:
            lib.st_acceptance_init(slot)

    def window(self, machine: Machine, right: Sequence[float], slow: float = 1.0) -> tuple[float, int, list[int]]:
        """One window: its ms, the tokens it brought, the depths it had."""
        rng = self.rng
        depths = choose(self.cost, self.slots, [self.most] * len(self.slots))
        rows = sum(1 + k for k in depths)
        noise = rng.choice([1.0, 1.0, 1.0, 4.0 if rng.random() < 0.1 else 1.1]) * slow
        ms, passes = machine.window(rows) * noise, max(depths)
        lib.st_spec_count_window(self.cost, rows, ms)
        if passes:
            lib.st_spec_count_drafts(self.cost, passes, passes * machine.draft * noise)
        tokens = 0
        for slot, depth in zip(self.slots, depths, strict=True):
            accepted = next((i for i in range(depth) if rng.random() >= right[i]), depth)
            if depth:
                lib.st_acceptance_count(slot, depth, accepted)
            tokens += 1 + accepted
        return machine.window(rows) + passes * machine.draft, tokens, depths

    def rate(self, machine: Machine, right: Sequence[float], windows: int, slow: float = 1.0) -> float:
        """Tokens per ms; the noise is not counted, it only misleads."""
        runs = [self.window(machine, right, slow) for _ in range(windows)]
        return sum(tokens for _, tokens, _ in runs) / sum(ms for ms, _, _ in runs)

    def depths(self, machine: Machine, right: Sequence[float], windows: int) -> list[int]:
        return [k for _ in range(windows) for k in self.window(machine, right)[2]]


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_it_comes_within_3_percent_of_the_best_fixed_depth(machine: str, text: str, slots: int) -> None:
    want, depth = best_fixed(MACHINES[machine], TEXTS[text], slots, DEPTHS)
    rates = []
    for seed in range(3):
        simulation = Simulation(slots, seed)
        simulation.rate(MACHINES[machine], TEXTS[text], 200)
        rates.append(simulation.rate(MACHINES[machine], TEXTS[text], 1500))
    assert sum(rates) / len(rates) >= NEARLY * want, f"the best fixed depth is {depth}"


@pytest.mark.parametrize("machine", MACHINES)
def test_it_all_but_never_drafts_where_that_cannot_pay(machine: str) -> None:
    simulation = Simulation(1)
    simulation.depths(MACHINES[machine], TEXTS["hopeless"], 300)
    depths = simulation.depths(MACHINES[machine], TEXTS["hopeless"], 2000)
    assert sum(k > 0 for k in depths) <= 0.08 * len(depths)


def test_it_tries_again_when_the_text_may_have_changed() -> None:
    machine = MACHINES["a little of each"]
    simulation = Simulation(1)
    simulation.rate(machine, TEXTS["hopeless"], 1500)
    simulation.rate(machine, TEXTS["predictable"], 1500)  # the same request goes on
    assert (
        simulation.rate(machine, TEXTS["predictable"], 500)
        >= NEARLY * best_fixed(machine, TEXTS["predictable"], 1, 8)[0]
    )


def test_a_new_request_is_judged_by_itself() -> None:
    machine = MACHINES["a little of each"]
    simulation = Simulation(1)
    for text in ("hopeless", "predictable", "good at first", "poor"):
        lib.st_acceptance_renew(simulation.slots[0])
        simulation.rate(machine, TEXTS[text], 400)
        assert simulation.rate(machine, TEXTS[text], 600) >= 0.95 * best_fixed(machine, TEXTS[text], 1, 8)[0], text


def test_a_machine_that_others_use_too_is_followed() -> None:
    """Everything takes three times as long for a while: no reason for another depth."""
    machine, text = MACHINES["four rows cost 2.8"], TEXTS["good at first"]
    want = best_fixed(machine, text, 1, 8)[0]
    simulation = Simulation(1)
    simulation.rate(machine, text, 300)
    assert simulation.rate(machine, text, 400, slow=3.0) >= NEARLY * want
    assert simulation.cost.scale > 2
    assert simulation.rate(machine, text, 400) >= NEARLY * want


@pytest.mark.parametrize("most", [0, 1, 3, 8])
def test_it_never_drafts_deeper_than_it_may(most: int) -> None:
    simulation = Simulation(2, most=most)
    depths = simulation.depths(MACHINES["rows are cheap"], TEXTS["predictable"], 300)
    assert max(depths) == most
    assert min(depths) >= 0


def test_slots_of_different_texts_each_get_what_they_deserve() -> None:
    """Three slots whose drafts are always right, five whose never are: better than any depth for all."""
    machine = MACHINES["a little of each"]
    simulation = Simulation(8)
    for slot, right in zip(simulation.slots, [0.98] * 3 + [0.02] * 5, strict=True):
        slot.right = [right] * DEPTHS
        slot.seen = [30] * DEPTHS
    for _ in range(40):
        for rows in range(8, 60):
            lib.st_spec_count_window(simulation.cost, rows, machine.window(rows))
        lib.st_spec_count_drafts(simulation.cost, 1, machine.draft)
    depths = choose(simulation.cost, simulation.slots, [8] * 8)
    assert min(depths[:3]) >= 3
    assert depths[3:] == [0] * 5
    assert choose(simulation.cost, simulation.slots, [2, 0, 8, 8, 8, 8, 8, 8])[:2] == [2, 0]


def test_nothing_known_and_nonsense_do_no_harm() -> None:
    cost, slot = ffi.new("st_spec_cost *"), ffi.new("st_acceptance *")
    lib.st_acceptance_init(slot)
    assert lib.st_spec_window_ms(cost, 5) == 0
    assert choose(cost, [], []) == []
    for rows, ms in ((0, 1.0), (-1, 1.0), (3, 0.0), (3, -1.0), (100000, 5.0)):
        lib.st_spec_count_window(cost, rows, ms)
    lib.st_spec_count_drafts(cost, 0, 1.0)
    lib.st_acceptance_count(slot, 100, 100)
    assert 0 <= choose(cost, [slot], [100])[0] <= DEPTHS
    for _ in range(30):
        lib.st_spec_count_window(cost, 4, 1e-9)
        lib.st_spec_count_drafts(cost, 1, 0.0)
    assert 0 <= choose(cost, [slot], [100])[0] <= DEPTHS
    assert all(0 <= k <= DEPTHS for k in choose(cost, [slot] * 65, [8] * 65))
    assert choose(cost, [slot], [-1]) == [0]
