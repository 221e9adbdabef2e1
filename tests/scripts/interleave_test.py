"""A long prompt read while two slots decode, a prompt that gives way and goes on, a next turn from its slot.

Each must say what it says alone, and the two streams must not fall silent. Exits with 1 when that is not so.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.exactness.slots import HIDDEN, Slots, Stream
from tests.scripts.common import Bench, guarded, options


def read_beside_two(bench: Bench, slots: Slots) -> dict[str, Stream]:
    """The long prompt in slot 2 beside the streams of slots 0 and 1."""
    args = bench.args
    streams = [slots.begin(i, bench.request(bench.words(args.prompt), args.max_new)) for i in (0, 1)]
    while not all(s.texts or s.ended for s in streams):
        slots.take()
    reader = slots.begin(2, bench.request(bench.words(args.long), 16))
    begin, last, gap, heard = time.monotonic(), time.monotonic(), 0.0, 0
    while not reader.admitted and not reader.ended:
        word, _ = slots.take(600)
        if word == "BT":
            gap, last, heard = max(gap, time.monotonic() - last), time.monotonic(), heard + 1
    seconds = time.monotonic() - begin
    print(f"read {args.long / seconds:.0f} tok/s beside two streams ({heard} tokens), longest gap {gap * 1e3:.0f} ms")
    bench.say("the streams went on during the read", heard >= 2 or any(s.ended for s in streams))
    slots.finish()
    return {"stream 0": streams[0], "stream 1": streams[1], "long prompt": reader}


def give_way(bench: Bench, slots: Slots, slot: int, to: int) -> Stream:
    """A read that gives way after its first chunks and goes on in slot `to`."""
    request = bench.request(bench.words(bench.args.long), 16)
    first = slots.begin(slot, request)
    while len(first.progress) < 2 and not first.ended:
        slots.take(600)
    slots.engine.send(f"BYIELD {to}")
    slots.finish(first)
    second = slots.run(to, request)
    bench.say(f"given way at {first.yielded}, gone on from {second.resumed}", first.yielded == second.resumed)
    return second


def main() -> int:
    bench = Bench(options(__doc__, long=1500, prompt=40, max_new=400, chunk=64).parse_args())
    with bench.slots("--parallel", 3, "--chunk", bench.args.chunk) as slots:
        bench.learn(slots)
        streams = read_beside_two(bench, slots)
        streams["given way in a slot"] = give_way(bench, slots, 0, 0)
        streams["handed from GEN to a slot"] = give_way(bench, slots, HIDDEN, 1)
        before = streams["stream 0"] = slots.run(0, bench.request(bench.words(bench.args.prompt), 40))
        turn = (*before.request.ids, *before.tokens, *bench.words(20))
        after = streams["next turn"] = slots.run(0, bench.request(turn, 40))
        held = len(before.request.ids) + len(before.texts) - 1
        bench.say(f"the next turn begins at {after.resumed} of {held} held", after.resumed == held)
    bench.compare(streams)
    return bench.end()


if __name__ == "__main__":
    guarded(main)
