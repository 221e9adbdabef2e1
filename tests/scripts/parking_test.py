"""A follow-up says the same whether its state stayed in its slot, came from a checkpoint, or had to be read again.

Conversations that together need more pages than there are are parked and go on. Exits with 1 on a difference.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.exactness.slots import Stream
from tests.scripts.common import Bench, guarded, options


def follow_ups(bench: Bench) -> dict[str, Stream]:
    """The same follow-up live in its slot, from a checkpoint in another one, and with nothing kept."""
    out: dict[str, Stream] = {}
    for name, cache in (("kept", 256), ("nothing kept", 0)):
        with bench.slots("--parallel", 2, "--prompt-cache-mib", cache) as slots:
            if not bench.vocab:
                bench.learn(slots)
                opening, more, other = (bench.words(bench.args.prompt) for _ in range(3))
            first = slots.run(0, bench.request(opening, bench.args.max_new))
            turn = bench.request((*opening, *first.tokens, *more), bench.args.max_new)
            if cache:
                out["live in its slot"] = slots.run(0, turn)
                slots.run(0, bench.request(opening, bench.args.max_new))
            slots.run(0, bench.request(other, 4))  # takes the slot: what it held becomes a checkpoint
            out[f"another slot, {name}"] = parked = slots.run(1, turn)
            bench.say(
                f"{name}: begins at {parked.resumed}", (parked.resumed or 0) > 0 if cache else parked.resumed == 0
            )
    return out


def short_of_pages(bench: Bench) -> dict[str, Stream]:
    """Four conversations in pages for little more than one."""
    tokens = bench.args.prompt + bench.args.max_new
    blocks = -(-tokens // 64) + 1
    with bench.slots("--parallel", 4, "--pool-blocks", blocks) as slots:
        requests = [bench.request(bench.words(bench.args.prompt), bench.args.max_new) for _ in range(4)]
        streams = {f"pages for one, slot {i}": slots.begin(i, r) for i, r in enumerate(requests)}
        slots.finish()
        pool = slots.stat()["pool"]
    bench.say(f"{pool['parked']} times parked, {pool['blocks']} of {blocks} pages in use", pool["blocks"] <= blocks)
    return streams


def main() -> int:
    bench = Bench(options(__doc__, prompt=90, max_new=100).parse_args())
    bench.compare(follow_ups(bench) | short_of_pages(bench))
    return bench.end()


if __name__ == "__main__":
    guarded(main)
