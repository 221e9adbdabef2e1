"""Engines on paper for tests of the scheduler: one that says what the test says, one that works like the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stratad.engine_protocol import (
    Answer,
    SlotAdmitted,
    SlotDone,
    SlotErr,
    SlotGen,
    SlotProgress,
    SlotResume,
    SlotStop,
    SlotToken,
    SlotYield,
    Stat,
    StatLine,
    Yielded,
    parse_request,
)
from stratad.supervisor import EngineState
from stratad.types import EngineFacts

VOCABULARY = 1000
END = 0  # the token that ends an answer
CHUNK = 64
CONTEXT = 4096


def facts(slots: int = 1) -> EngineFacts:
    """What an engine with so many slots says of itself."""
    return EngineFacts(CONTEXT, {"batch_slots": str(slots)})


class PaperEngine:
    """The supervisor's part, played by the test."""

    def __init__(self, slots: int = 1) -> None:
        self.state = EngineState.READY
        self.facts: EngineFacts | None = facts(slots)
        self.reason = ""
        self.failures = 0
        self.sent: list[str] = []
        self.expected: list[tuple[float | None, float | None]] = []
        self.asked = 0
        self.killed = ""

    def send(self, line: bytes) -> None:
        self.sent.append(line.decode().strip())

    def expect(self, silence: float | None, end_by: float | None = None) -> None:
        self.expected.append((silence, end_by))

    def ask(self) -> bool:
        self.asked += 1
        return True

    def kill(self, reason: str) -> None:
        self.killed = reason


def next_token(ids: Sequence[int]) -> int:
    """The token that follows: a function of everything before it, as a model's is. Now and then the end."""
    value = 17
    for token in ids[-5:]:
        value = (value * 31 + token + 7) % 1_000_003
    return (value + len(ids) * 13) % VOCABULARY


def whole_answer(prompt: Sequence[int], max_new: int) -> list[int]:
    """The answer that this prompt gets from an engine which nothing happens to."""
    ids = list(prompt)
    while len(ids) - len(prompt) < max_new and len(ids) < CONTEXT:
        ids.append(next_token(ids))
        if ids[-1] == END:
            break
    return ids[len(prompt) :]


@dataclass
class _Slot:
    held: list[int] = field(default_factory=list)
    ids: list[int] | None = None  # of the running request; None: idle
    prompt: int = 0
    position: int = 0
    reused: int = 0
    generated: int = 0
    budget: int = 0
    stop: bool = False
    give_way: bool = False


class SlotEngine(PaperEngine):
    """Answers as the real engine does, one window at a time; `window` returns the lines of one, in order."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.state = EngineState.LOADING
        self.slots: list[_Slot] = []
        self.pending: list[Answer] = []
        self.deadly: Callable[[Sequence[int], int], bool] = lambda _ids, _generated: False

    def start(self, slots: int) -> EngineFacts:
        """A new process that is ready."""
        self.state, self.facts, self.killed = EngineState.READY, facts(slots), ""
        self.slots = [_Slot() for _ in range(slots)]
        self.pending = []
        return self.facts

    def busy(self) -> list[int]:
        """Slots in which a request runs."""
        return [number for number, slot in enumerate(self.slots) if slot.ids is not None]

    def ask(self) -> bool:
        if any(isinstance(answer, StatLine) for answer in self.pending):
            return False
        self.send(b"STAT\n")
        return True

    def send(self, line: bytes) -> None:
        request = parse_request(line.rstrip(b"\n"))
        if isinstance(request, SlotGen):
            self._admit(request)
        elif isinstance(request, SlotStop):
            self.slots[request.slot].stop = self.slots[request.slot].ids is not None
        elif isinstance(request, SlotYield):
            slot = self.slots[request.slot]
            slot.give_way = slot.give_way or (slot.ids is not None and slot.position < len(slot.ids))
        else:
            assert isinstance(request, Stat)
            rows = [{"slot": number, "state": "idle" if slot.ids is None else "reading"}
                    for number, slot in enumerate(self.slots)]  # fmt: skip
            self.pending.append(StatLine({"slots": rows}))

    def _admit(self, request: SlotGen) -> None:
        slot = self.slots[request.slot]
        assert slot.ids is None, "two requests in one slot"
        if len(request.ids) >= CONTEXT:
            self.pending.append(SlotErr(request.slot, "context_full", "too long"))
            return
        ids = list(request.ids)
        kept = len(slot.held) if slot.held and slot.held == ids[: len(slot.held)] and len(slot.held) < len(ids) else 0
        self.slots[request.slot] = _Slot(slot.held[:kept], ids, len(ids), kept, kept, 0, request.max_new)
        self.pending.append(SlotResume(request.slot, kept))

    def window(self, draft: int = 1) -> list[Answer] | None:
        """One window over every busy slot; None: the engine died of it, with `pending` as its last words."""
        for number, slot in enumerate(self.slots):
            if slot.ids is None:
                continue
            if self.deadly(slot.ids, slot.generated + len(slot.ids)):
                return None
            if slot.position < slot.prompt:
                self._read(number, slot)
            else:
                self._decode(number, slot, draft)
        answers, self.pending = self.pending, []
        return answers

    def _read(self, number: int, slot: _Slot) -> None:
        assert slot.ids is not None
        if slot.stop or slot.give_way:
            if not slot.stop:
                self.pending.append(Yielded(number, slot.position))
            self._end(number, slot, "cancel")
            return
        slot.position = min(slot.position + CHUNK, slot.prompt)
        self.pending.append(SlotProgress(number, slot.position, slot.prompt, 1.0, 1000.0))
        if slot.position == slot.prompt:
            self.pending.append(SlotAdmitted(number, 1))
            self._decode(number, slot, 1)

    def _decode(self, number: int, slot: _Slot, most: int) -> None:
        assert slot.ids is not None
        for _ in range(most):
            token = next_token(slot.ids)
            slot.ids.append(token)
            slot.generated += 1
            self.pending.append(SlotToken(number, token))
            reason = "stop" if token == END else "cancel" if slot.stop else ""
            if not reason and (slot.generated >= slot.budget or len(slot.ids) >= CONTEXT):
                reason = "length"
            if reason:
                self._end(number, slot, reason)
                return

    def _end(self, number: int, slot: _Slot, reason: str) -> None:
        assert slot.ids is not None
        read = slot.position - slot.reused
        self.pending.append(
            SlotDone(number, slot.generated, reason, 10.0, 0, 0, slot.prompt, slot.reused, 5.0, 5.0, read)
        )
        held = slot.ids[:-1] if slot.generated else slot.ids[: slot.position]
        self.slots[number] = _Slot(held)
