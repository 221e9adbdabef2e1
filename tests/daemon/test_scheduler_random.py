"""The scheduler and an engine on paper under everything that can happen, in every order."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stratad.engine_protocol import Answer
from stratad.errors import StrataError
from stratad.generation import ScheduledGeneration
from stratad.scheduler import DEADLY_ALONE, MOST_YIELDS, PROBATION, Scheduler
from stratad.settings import BY_NAME, Effective, Settings
from stratad.supervisor import EngineState
from stratad.types import Done, GenRequest, Sampling, Token

from tests.daemon.slot_engine import END, SlotEngine, whole_answer
from tests.daemon.virtual import VirtualTime, World

POISON = 666  # a prompt that begins with it kills the engine when so many tokens are there
POISON_AT = 5


class Follower:
    """What one client sees, and what it should see."""

    def __init__(self, generation: ScheduledGeneration) -> None:
        request = generation.request
        self.generation = generation
        self.expected = whole_answer(request.prompt_ids, request.max_new)
        self.poison = request.prompt_ids[0] == POISON and len(self.expected) > POISON_AT
        self.got: list[int] = []
        self.ends: list[str] = []
        self.cancelled = False
        self.lonely_deaths = 0

    def read(self) -> None:
        """Take what is there."""
        for event in self.generation.take():
            assert not self.ends, "something came after the end"
            if isinstance(event, Token):
                self.got.append(event.id)
            elif isinstance(event, Done):
                self.ends.append(event.finish)
                assert event.generated == len(self.got) and event.prompt_tokens == len(self.generation.record.prompt)
        assert self.got == self.expected[: len(self.got)], "tokens of another, or none of anybody's"
        if self.generation.ended and not self.ends:
            self.ends.append(self._error().name)

    def _error(self) -> StrataError:
        try:
            asyncio.run(_next(self.generation))
        except StrataError as error:
            return error
        raise AssertionError("it ended without a word")


async def _next(generation: ScheduledGeneration) -> object:
    return await anext(generation)


class Everything(RuleBasedStateMachine):
    """Clients come and go, prompts are long and short, engines die in mid-word and come back with other slots."""

    def __init__(self) -> None:
        super().__init__()
        self.time = VirtualTime()
        self.engine = SlotEngine(3)
        self.engine.deadly = lambda ids, _: ids[0] == POISON and len(ids) >= self.prompt_of(ids) + POISON_AT
        values = {"queue_wait_limit_s": 0, "restart_wait_limit_s": 86_400, "stall_limit_s": 30}
        limits = Settings({name: Effective(BY_NAME[name].check(value)) for name, value in values.items()})
        effects = World().effects()
        self.scheduler = Scheduler(limits, type(effects)(effects.spawn, self.time.now, self.time.sleep))
        self.scheduler.attach(self.engine)
        self.engine.state = EngineState.READY
        self.scheduler.engine_ready(self.engine.start(3))
        self.followers: list[Follower] = []
        self.prompts: dict[int, int] = {}  # of poisonous requests, by second token: the length of the prompt
        self.refused = 0

    def prompt_of(self, ids: object) -> int:
        return self.prompts[ids[1]]  # type: ignore[index]

    # -- what happens

    @rule(
        client=st.sampled_from("abc"),
        length=st.sampled_from([1, 2, 30, 200, 700, 1500]),
        max_new=st.sampled_from([1, 2, 10, 60, 200]),
        base=st.integers(0, 5),
        poison=st.integers(0, 9).map(lambda number: number == 0),
    )
    def submit(self, client: str, length: int, max_new: int, base: int, poison: bool) -> None:
        number = len(self.followers)
        prompt = [1 + (base * 7 + index) % 400 for index in range(length)]
        if poison:
            prompt = [POISON, 400 + number, *prompt]
            self.prompts[400 + number] = len(prompt)
        request = GenRequest(tuple(prompt), max_new, Sampling(), client, frozenset({END}))
        try:
            self.followers.append(Follower(self.scheduler.submit(request)))
        except StrataError:
            self.refused += 1

    @precondition(lambda self: self.followers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        follower = data.draw(st.sampled_from(self.followers))
        follower.cancelled = follower.cancelled or not follower.generation.ended
        self.scheduler.cancel(follower.generation)

    @precondition(lambda self: self.followers)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.followers)).read()

    @rule(windows=st.integers(1, 8), draft=st.integers(1, 4))
    def work(self, windows: int, draft: int) -> None:
        for _ in range(windows):
            self.window(draft)

    @rule(heard=st.floats(0, 1), slots=st.integers(1, 4), draft=st.integers(1, 4))
    def die(self, heard: float, slots: int, draft: int) -> None:
        """In mid-window, with a part of its lines on the way."""
        busy = self.engine.busy()
        answers = self.engine.window(draft) or []
        self.scheduler.engine_answers(answers[: int(heard * len(answers))])
        self.end_of_engine(slots)
        del busy

    @rule(seconds=st.sampled_from([0.5, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.time.jump(seconds)
        self.scheduler._tick()  # what its task does twice a second

    # -- how it happens

    def window(self, draft: int) -> None:
        answers: list[Answer] | None = self.engine.window(draft)
        if answers is None:
            self.end_of_engine(3)
            return
        self.time.jump(0.01)
        middle = len(answers) // 2
        self.scheduler.engine_answers(answers[:middle])
        self.scheduler.engine_answers(answers[middle:])
        assert not self.engine.killed, self.engine.killed

    def end_of_engine(self, slots: int) -> None:
        assert not self.engine.killed, self.engine.killed
        legs = [lane.leg for lane in self.scheduler.lanes if lane.leg is not None]
        for follower in self.followers:
            follower.lonely_deaths += len(legs) == 1 and legs[0].generation is follower.generation
        self.engine.state = EngineState.RESTARTING
        self.scheduler.engine_down("the engine ended: killed by SIGKILL", False)
        self.scheduler.engine_ready(self.engine.start(slots))

    # -- what always holds

    @invariant()
    def counts_add_up(self) -> None:
        counters, scheduler = self.scheduler.tally.requests, self.scheduler
        alive = [one for one in self.followers if not one.generation.ended]
        assert counters.submitted == len(self.followers)
        assert counters.refused == self.refused
        assert counters.finished + counters.cancelled + counters.failed == len(self.followers) - len(alive)
        assert scheduler.queued + scheduler.running == len(alive)
        assert sum(scheduler.tally.by_finish.values()) == len(self.followers) - len(alive)

    @invariant()
    def both_sides_agree(self) -> None:
        busy = [lane.slot for lane in self.scheduler.lanes if lane.leg is not None]
        assert set(self.engine.busy()) <= set(busy)  # a BDONE may be on its way
        said = {answer.slot for answer in self.engine.pending if hasattr(answer, "slot")}
        assert set(busy) - set(self.engine.busy()) <= said
        free = [lane for lane in self.scheduler.lanes if lane.leg is None]
        waits = self.scheduler.queued + len(self.scheduler._front)
        suspects = any(one.generation.deaths >= 2 for one in self.followers if not one.generation.ended)
        assert not (free and waits and not suspects), "a slot is free, and somebody waits"
        assert all(one.generation.yields <= MOST_YIELDS for one in self.followers)

    def teardown(self) -> None:
        """Left alone, every request ends, in the way it should."""
        windows = 0
        while any(not one.generation.ended for one in self.followers):
            self.window(2)
            windows += 1
            assert windows < 5000, "somebody starves"
        for follower in self.followers:
            follower.read()
            self.check_end(follower)
        assert self.scheduler.running == self.scheduler.queued == 0
        assert self.engine.busy() == []

    def check_end(self, follower: Follower) -> None:
        assert len(follower.ends) == 1
        end = follower.ends[0]
        if end in ("stop", "length"):
            assert follower.got == follower.expected
            assert (end == "stop") == (follower.got[-1] == END)
            assert not follower.poison or len(follower.got) <= PROBATION
        elif end == "cancel":
            assert follower.cancelled
        else:
            assert end == "engine_failed" and follower.lonely_deaths >= DEADLY_ALONE, end


Everything.TestCase.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEverything = Everything.TestCase
