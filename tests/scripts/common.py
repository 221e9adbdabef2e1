"""What the scripts share: their options, random prompts for any model, and the comparison."""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from tests.exactness.slots import Oracle, Request, Slots, Stream
from tests.native import driver


def options(description: str | None, **defaults: int) -> argparse.ArgumentParser:
    """The options that every script of an engine takes; `defaults` are the numbers of this one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--engine", type=Path, default=driver.ENGINE, help="the built strata-engine")
    parser.add_argument("--model", type=Path, default=driver.MODEL, help="GGUF file")
    parser.add_argument("--keys", default="", help='keys of every request, e.g. "temperature=0.7 seed=3"')
    parser.add_argument("--extra", default="", help='more options of the engine, e.g. "--threads 2 --spec 4"')
    parser.add_argument("--seed", type=int, default=1, help="of the random prompts")
    for name, value in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value, metavar="N", help="tokens or slots")
    return parser


class Bench:
    """An engine's options, its prompts and its oracle; counts what differs."""

    def __init__(self, args: argparse.Namespace) -> None:
        driver.ENGINE = args.engine.resolve()
        self.args = args
        self.extra: list[str] = shlex.split(args.extra)
        self.rng = random.Random(args.seed)
        self.failures = 0
        self.vocab = 0

    def slots(self, *options: str | int) -> Slots:
        """An engine with these options and those of --extra."""
        return Slots(*map(str, options), *self.extra, model=self.args.model)

    def learn(self, slots: Slots) -> None:
        """The size of the vocabulary, from the engine's first lines."""
        self.vocab = int(slots.engine.info["vocab"])

    def words(self, n: int) -> tuple[int, ...]:
        """n random tokens; the last eighth of a vocabulary, where control tokens lie, is left out."""
        return tuple(self.rng.randrange(self.vocab * 7 // 8) for _ in range(n))

    def request(self, ids: Sequence[int], max_new: int) -> Request:
        """A request with the keys of --keys."""
        pairs = (item.split("=", 1) for item in self.args.keys.split())
        return Request(tuple(ids), max_new, tuple((k, v) for k, v in pairs))

    def say(self, what: str, good: bool) -> None:
        """Report one comparison."""
        self.failures += not good
        print(f"{'ok  ' if good else 'FAIL'}  {what}", flush=True)

    def compare(self, streams: dict[str, Stream]) -> None:
        """Each stream against its request alone: one thread, no drafts, cold."""
        with closing(Oracle(self.args.model)) as oracle:
            for name, stream in streams.items():
                try:
                    oracle.check(stream)
                    self.say(f"{name}: {len(stream.texts)} tokens as alone ({stream.finish})", True)
                except AssertionError as error:
                    self.say(f"{name}: {str(error).splitlines()[0]}", False)

    def end(self) -> int:
        """The exit status, and a word on it."""
        print("all equal" if not self.failures else f"{self.failures} differ", flush=True)
        return min(self.failures, 1)


def guarded(main: Callable[[], int]) -> None:
    """Run a script's main; an engine that does not start or answer is one line, not a traceback."""
    try:
        sys.exit(main())
    except (AssertionError, OSError, driver.Refused) as error:
        print(f"FAIL  {str(error).splitlines()[0] if str(error) else type(error).__name__}", file=sys.stderr)
        sys.exit(1)
