#!/usr/bin/env python3
"""Speaks the engine's line protocol from a script. Run it as `python -m tests.fake_engine` or as a program.

It knows nothing of text: it emits token ids. Without flags it behaves: loads at once, answers `BGEN` in as many slots
as `--parallel` says, each request on a thread of its own, with `max_new` tokens that follow the last id given
(last+1, last+2, ...), and honours BSTOP, BYIELD, STAT and QUIT. Counts of tokens begin at `out_from`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def options() -> argparse.ArgumentParser:
    """Every flag; those of the real engine that the daemon passes are accepted and have no effect."""
    parser = argparse.ArgumentParser(prog="fake-engine", description=__doc__, allow_abbrev=False)
    real = parser.add_argument_group("options of the real engine, without effect")
    for name in (
        "--model", "--max-context", "--threads", "--kv", "--isa", "--spec", "--spec-min-p", "--stall-target-ms",
        "--decode-share", "--prompt-cache-mib", "--prompt-cache-every", "--memory-mib",
    ):  # fmt: skip
        real.add_argument(name)
    real.add_argument("--allow-untrained-context", action="store_true")
    script = parser.add_argument_group("what it says")
    script.add_argument("--parallel", type=int, default=1, help="slots")
    script.add_argument("--most-slots", type=int, default=64, help="slots at most, whatever --parallel says")
    script.add_argument("--context", type=int, default=4096, help="number in READY")
    script.add_argument("--vocab", type=int, default=8192, help="token ids stay below it")
    script.add_argument("--tokens", help="ids to emit, comma separated, over and over")
    script.add_argument("--echo", action="store_true", help="emit the prompt's ids")
    script.add_argument("--eos-after", type=int, help="finish with `stop` after N tokens")
    script.add_argument("--chunk", type=int, default=64, help="prompt tokens per PP line")
    script.add_argument("--reused", type=int, default=0, help="tokens taken from a session")
    script.add_argument("--logprobs", action="store_true", help="a log-probability with every token")
    script.add_argument("--delay-s", type=float, default=0.0, help="before every token")
    script.add_argument("--read-delay-s", type=float, default=0.0, help="before every prompt chunk")
    script.add_argument("--err", help="answer every request with BERR and this NAME TEXT")
    loading = parser.add_argument_group("faults while loading")
    loading.add_argument("--load-s", type=float, default=0.0, help="time to load, with load_percent in ten steps")
    loading.add_argument("--load-err", help="ERR with this NAME TEXT in place of READY, then exit with --load-exit")
    loading.add_argument("--load-exit", type=int, help="exit with this code in place of READY")
    loading.add_argument("--never-ready", action="store_true")
    faults = parser.add_argument_group("faults while answering")
    faults.add_argument("--exit-after", type=int, help="exit after N tokens")
    faults.add_argument("--exit-code", type=int, default=1, help="the code of --exit-after; negative: that signal")
    faults.add_argument("--hang-after", type=int, help="say nothing more after N tokens, whatever comes")
    faults.add_argument("--deaf", action="store_true", help="ignore BSTOP")
    faults.add_argument("--mute", action="store_true", help="ignore STAT")
    faults.add_argument("--ignore-sigterm", action="store_true", help="and QUIT, and the end of the input")
    faults.add_argument("--garbage", action="store_true", help="lines that are no protocol before every token")
    faults.add_argument("--invalid-utf8", action="store_true", help="bytes that are no text before every token")
    faults.add_argument("--half-lines", action="store_true", help="write every line in two pieces")
    faults.add_argument("--cut-line", action="store_true", help="--exit-after leaves half a token line behind")
    faults.add_argument("--huge-line", action="store_true", help="a line without an end in place of the first token")
    faults.add_argument("--bad-token", action="store_true", help="`BT x` in place of the first token")
    faults.add_argument("--extra-tokens", type=int, default=0, help="more than max_new")
    faults.add_argument("--stray-token", action="store_true", help="a token after BDONE")
    faults.add_argument("--grandchild", action="store_true", help="start a process that keeps the pipes open")
    faults.add_argument("--stderr-lines", type=int, default=0, help="so many lines of log at the start")
    faults.add_argument("--once", type=Path, help="faults only while this file does not exist; it is made")
    return parser


FAULTS = (
    "load_err load_exit never_ready exit_after hang_after deaf mute ignore_sigterm garbage invalid_utf8 cut_line "
    "huge_line bad_token extra_tokens stray_token"
)


class Slot:
    """One request at a time, on a thread."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.busy = False
        self.stop, self.give_way = threading.Event(), threading.Event()


class FakeEngine:
    """One run of the script."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.lines: queue.Queue[str] = queue.Queue()
        self.slots = [Slot(number) for number in range(min(args.parallel, args.most_slots))]
        self.hung = False
        self.writing = threading.Lock()
        if args.once is not None:
            if args.once.exists():
                defaults = options().parse_args([])
                for name in FAULTS.split():
                    setattr(args, name, getattr(defaults, name))
            else:
                args.once.write_text("done\n")

    # -- output

    def say(self, text: str) -> None:
        self.write(text.encode() + b"\n")

    def write(self, data: bytes) -> None:
        with self.writing:
            if self.args.half_lines and len(data) > 1:
                middle = len(data) // 2
                self.raw(data[:middle])
                time.sleep(0.002)
                data = data[middle:]
            self.raw(data)

    @staticmethod
    def raw(data: bytes) -> None:
        try:
            while data:
                data = data[os.write(1, data) :]
        except BrokenPipeError:
            os._exit(1)

    # -- input

    def listen(self) -> None:
        for line in sys.stdin:
            text = line.rstrip("\n")
            word, _, rest = text.partition(" ")
            if word in ("BSTOP", "BYIELD"):
                slot = self.slots[int(rest)]
                (slot.stop if word == "BSTOP" else slot.give_way).set()
            elif text == "STAT" and not self.args.mute and not self.hung:
                self.say("STAT " + json.dumps({"slots": [self.describe(slot) for slot in self.slots]}))
            else:
                self.lines.put(text)
        self.lines.put("QUIT")

    @staticmethod
    def describe(slot: Slot) -> dict[str, object]:
        return {"slot": slot.number, "state": "decoding" if slot.busy else "idle", "parked": False}

    # -- the script

    def run(self) -> int:
        self.obey_signals()
        for number in range(self.args.stderr_lines):
            print(f"log line {number}", file=sys.stderr, flush=True)
        if self.args.grandchild:
            subprocess.Popen(["sleep", "600"])
        self.say("INFO engine=0.0.0 protocol=1 arithmetic=1 arch=fake")
        code = self.load()
        if code is not None:
            return code
        self.say(f"INFO batch_slots={len(self.slots)} slot_cache=1 mtp=0 spec=0")
        self.say(f"READY {self.args.context} stop")
        threading.Thread(target=self.listen, daemon=True).start()
        while (line := self.lines.get()) != "QUIT" or self.args.ignore_sigterm:
            if line.startswith("BGEN "):
                self.admit(line)
            elif line not in ("STAT", "QUIT"):
                self.say("ERR bad_command unknown command")
        return 0

    def admit(self, line: str) -> None:
        words = line.split(" ")
        slot = self.slots[int(words[1])]
        if slot.busy:
            self.say(f"BERR {slot.number} busy the slot is busy until its BDONE")
            return
        slot.busy = True
        slot.stop.clear()
        slot.give_way.clear()
        threading.Thread(target=self.generate, args=(slot, words), daemon=True).start()

    def obey_signals(self) -> None:
        if self.args.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

    def load(self) -> int | None:
        for step in range(10 if self.args.load_s else 0):
            self.say(f"INFO load_percent={step * 10}")
            time.sleep(self.args.load_s / 10)
        self.say("INFO identity=00ff fingerprint=ff00 threads=1 kv=int8 vocab=" + str(self.args.vocab))
        if self.args.load_err:
            self.say("ERR " + self.args.load_err)
        if self.args.load_exit is not None or self.args.load_err:
            return 1 if self.args.load_exit is None else int(self.args.load_exit)
        while self.args.never_ready:
            time.sleep(0.1)
        return None

    def generate(self, slot: Slot, words: list[str]) -> None:
        max_new, tag = int(words[2]), slot.number
        ids = [int(part) for part in words[-1].split(",")]
        keys = dict(word.split("=", 1) for word in words[3:-1])
        prompt = ids[: int(keys.get("out_from", len(ids)))]
        if self.args.err:
            slot.busy = False
            self.say(f"BERR {tag} {self.args.err}")
            return
        started = time.monotonic()
        position = self.read_prompt(slot, ids)
        prompt_ms = (time.monotonic() - started) * 1000
        count, finish = 0, "cancel"
        if position == len(ids):
            self.say(f"BADM {tag} 1")
            count, finish = self.decode(slot, ids, prompt, max_new)
        elif slot.give_way.is_set() and not slot.stop.is_set():
            self.say(f"YIELDED {tag} {position}")
        ms = (time.monotonic() - started) * 1000
        reused = min(self.args.reused, len(ids))
        slot.busy = False
        self.say(
            f"BDONE {tag} {count} {finish} {ms:.3f} 0 0 {len(ids)} {reused} {prompt_ms:.3f} {ms - prompt_ms:.3f} "
            f"{position - reused} trailing fields are skipped"
        )
        if self.args.stray_token:
            self.say(f"BT {tag} 1")

    def read_prompt(self, slot: Slot, ids: list[int]) -> int:
        """Returns how far it came."""
        position = min(self.args.reused, len(ids))
        self.say(f"BRESUME {slot.number} {position}")
        while position < len(ids):
            time.sleep(self.args.read_delay_s)
            if (slot.stop.is_set() and not self.args.deaf) or slot.give_way.is_set():
                break
            position = min(position + self.args.chunk, len(ids))
            self.say(f"BPP {slot.number} {position} {len(ids)} 1.5 100.0")
        return position

    def decode(self, slot: Slot, ids: list[int], prompt: list[int], max_new: int) -> tuple[int, str]:
        said = len(ids) - len(prompt)
        count = max_new + self.args.extra_tokens
        for index in range(count):
            time.sleep(self.args.delay_s)
            self.misbehave(slot, said + index)
            self.token(slot, self.choose(prompt, said + index))
            if self.args.eos_after is not None and said + index + 1 >= self.args.eos_after:
                return index + 1, "stop"
            if slot.stop.is_set() and not self.args.deaf:
                return index + 1, "cancel"
        return count, "length"

    def choose(self, prompt: list[int], index: int) -> int:
        if self.args.tokens:
            script = self.args.tokens.split(",")
            return int(script[index % len(script)])
        if self.args.echo:
            return prompt[index % len(prompt)]
        return int((prompt[-1] + 1 + index) % self.args.vocab)

    def token(self, slot: Slot, token: int) -> None:
        more = f" lp=-0.5 top={token}:-0.5,7:-1.25 more=1" if self.args.logprobs else ""
        self.say(f"BT {slot.number} {token}{more}")

    def misbehave(self, slot: Slot, index: int) -> None:
        args = self.args
        if args.garbage:
            self.write(b"what is this\n\n\0\x01 BT 0 5\nTOKEN 5\n")
        if args.invalid_utf8:
            self.write(b"\xff\xfe\x80 caf\xe9\n")
        if args.huge_line:
            while True:
                self.raw(b"x" * 65536)
        if args.bad_token:
            self.say(f"BT {slot.number} x")
        if args.hang_after is not None and index >= args.hang_after:
            self.hung = True
            while True:
                time.sleep(1)
        if args.exit_after is not None and index >= args.exit_after:
            self.end()

    def end(self) -> None:
        if self.args.cut_line:
            self.raw(b"BT 0 12")
        if self.args.exit_code < 0:
            os.kill(os.getpid(), -self.args.exit_code)
            time.sleep(10)
        os._exit(self.args.exit_code)


def main() -> int:
    """Run the script of the command line."""
    with contextlib.suppress(KeyboardInterrupt):
        return FakeEngine(options().parse_args()).run()
    return 130


if __name__ == "__main__":
    os._exit(main())  # an orderly end of Python would give SIGTERM its deadly meaning back first
