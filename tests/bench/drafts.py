"""What drafts bring by the kind of text: the engine's own choice of depth beside every fixed depth and beside none.

All engines run at once, one working while the others rest, and each request goes to all of them before the next, in
an order that changes. Answers are exact, so all make the same tokens: the bench checks that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tests.bench.engine import BenchError, Done, Engine
from tests.bench.report import Row
from tests.bench.spread import Plan, Sample, Series, Watch, take_turns
from tests.bench.subject import Subject
from tests.bench.windows import has_drafter

DEPTHS = (0, 1, 2, 3)  # 0: no drafts
CONTROLLER = "controller"
GENERATED = 256  # at most, for an answer that ends by itself
CONTEXT = 768
FINE = 1.06  # greatest by least ratio beyond which more pairs are taken: a few percent are to be told
NAMES = ("Anna", "Oscar", "Nora", "Emil")
ANIMALS = ("fox", "horse", "owl", "dog")


@dataclass(frozen=True)
class Ask:
    """One request: its prompt and its keys."""

    ids: Sequence[int]
    keys: str


@dataclass(frozen=True)
class Kind:
    """A kind of text, and the requests that make it."""

    name: str
    asks: Callable[[Subject], list[Ask]]


def chats(subject: Subject, questions: Sequence[str], keys: str, begun: str = "") -> list[Ask]:
    """Greedy requests, one a question; `begun` is the begin of every answer."""
    start = subject.model.tokens.encode(begun) if begun else []
    return [Ask([*subject.chat_ids([{"role": "user", "content": q}]), *start], keys) for q in questions]


def predictable(subject: Subject) -> list[Ask]:
    """Counting, and sentences after one pattern; each answer ends by itself, since what came after would be neither."""
    questions = [f"Count from 1 to {n}." for n in (17, 18, 19, 20)]
    questions += [f"Write ten sentences about the {animal}." for animal in ANIMALS]
    return chats(subject, questions, "temperature=0 ckpt=0")


def code(subject: Subject) -> list[Ask]:
    """A class that goes on and on."""
    begun = "```python\nclass {}:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    asks = []
    for name in ("Queue", "Parser", "Table", "Buffer"):
        question = [f"Write a Python class {name} with many methods."]
        asks += chats(subject, question, f"temperature=0 {subject.endless}", begun.format(name))
    return asks


def prose(subject: Subject) -> list[Ask]:
    """Stories."""
    questions = [f"Write a story about {n} and a {a}." for n, a in zip(NAMES, ANIMALS, strict=True)]
    return chats(subject, questions, f"temperature=0 {subject.endless}")


def chat(subject: Subject) -> list[Ask]:
    """Questions whose answers end by themselves."""
    questions = [
        "What is the capital of France?", "Who are you?", "Why is the sky blue?", "What can you do?",
        "What is the opposite of heavy?", "Tell me a joke.", "What is 12 plus 30?", "Describe a river.",
        "What is the meaning of the word garden?", "Describe an owl.", "Which day comes after Monday?", "Hello!",
    ]  # fmt: skip
    return chats(subject, questions, "temperature=0 ckpt=0")


def noise(subject: Subject) -> list[Ask]:
    """Prompts of random tokens, answered at temperature 1."""
    return [Ask(subject.random_ids(64, seed), f"temperature=1 seed={seed} {subject.endless}") for seed in range(4)]


PREDICTABLE = Kind("Predictable text", predictable)
KINDS = (PREDICTABLE, Kind("Code", code), Kind("Prose", prose), Kind("Chat", chat), Kind("Random text", noise))


@dataclass(frozen=True)
class Total:
    """All answers of one engine in a turn."""

    done: Sequence[Done]

    def sample(self, name: str) -> dict[str, float]:
        """Tokens per second, tokens per window, and the share of drafts that were right (percent) where there were."""
        tokens = sum(done.generated - 1 for done in self.done)
        ms, windows = sum(done.decode_ms for done in self.done), sum(done.windows for done in self.done)
        offered, accepted = sum(done.offered for done in self.done), sum(done.accepted for done in self.done)
        if ms <= 0 or windows <= 0:
            raise BenchError("answers of a single token each tell nothing about drafts")
        sample = {f"rate {name}": 1e3 * tokens / ms, f"tokens {name}": tokens / windows}
        return sample | ({f"right {name}": 100 * accepted / offered} if offered else {})


def rotated(names: Sequence[str], by: int) -> list[str]:
    """`names` in order, beginning with another one each time."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


def ask_all(engines: Mapping[str, Engine], asks: Sequence[Ask], turn: int) -> Sample:
    """One turn: every request to every engine. Raises BenchError where their answers differ."""
    done: dict[str, list[Done]] = {name: [] for name in engines}
    for i, ask in enumerate(asks):
        answers = {}
        for name in rotated(list(engines), turn + i):
            told, answers[name], _ = engines[name].generate(ask.ids, GENERATED, ask.keys)
            done[name].append(told)
        if any(answer != answers[CONTROLLER] for answer in answers.values()):
            raise BenchError(f"drafts have changed the answer to request {i}")
    sample: dict[str, float] = {}
    for name, told_all in done.items():
        sample |= Total(told_all).sample(name)
    return sample | {"gain": sample[f"rate {CONTROLLER}"] / sample["rate 0"]}


def best_depth(series: Series) -> int:
    """The fixed depth with the greatest median rate, none being one of them; of equal ones the least."""
    medians = {depth: spread.median for depth in DEPTHS if (spread := series.ours(f"rate {depth}")) is not None}
    return max(medians, key=lambda depth: medians[depth])


def rows_of(series: Series, kind: str) -> list[Row]:
    """The table rows of one kind of text."""
    best = best_depth(series)
    ours = {metric: f"{metric} {CONTROLLER}" for metric in ("rate", "tokens", "right")}
    fixed = series.between(ours, {metric: f"{metric} {best}" for metric in ours})
    none = series.between(ours, {"rate": "rate 0"})
    fixed_name = f"always {best}" if best else "none"
    return [
        Row.of(none, "rate", f"{kind}, beside none", "tok/s"),
        Row.of(fixed, "rate", f"{kind}, beside the best fixed depth ({fixed_name})", "tok/s"),
        Row.of(fixed, "tokens", f"{kind}, tokens a window", "", detail=True),
        Row.of(fixed, "right", f"{kind}, drafts that were right", "%", detail=True),
    ]


def engine_args(threads: int) -> dict[str, list[str]]:
    """The command lines of all engines, by name: the controller's, then a depth's."""
    common = ["--threads", str(threads), "--max-context", str(CONTEXT)]
    fixed = {str(depth): [*common, "--spec", str(depth), "--spec-fixed"] for depth in DEPTHS}
    return {CONTROLLER: common, **fixed}


def compare(subject: Subject, threads: int, plan: Plan, watch: Watch) -> list[Row]:
    """All kinds of text on one model, which share the plan's time; nothing for a model without a drafter."""
    part = dataclasses.replace(plan.among(len(KINDS)), wide=min(plan.wide, FINE))
    rows: list[Row] = []
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name, args in engine_args(threads).items():
            engines[name] = stack.enter_context(Engine(subject.path, *args))
            if not has_drafter(engines[name]):
                return []
        for kind in KINDS:
            asks = kind.asks(subject)
            ask_all(engines, asks, 0)  # warms up
            turns = take_turns(lambda turn, asks=asks: ask_all(engines, asks, turn), None, part, watch, ["gain"])  # type: ignore[misc]
            rows += rows_of(turns, kind.name)
    return rows
