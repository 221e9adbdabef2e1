"""The same prompts alone and together in the slots: every slot's tokens equal those of its prompt alone.

Prints the rate of both. Exits with 1 when a token differs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.exactness.slots import HIDDEN
from tests.scripts.common import Bench, guarded, options


def main() -> int:
    bench = Bench(options(__doc__, n=8, prompt=60, max_new=150).parse_args())
    n = bench.args.n
    with bench.slots("--parallel", n) as slots:
        bench.learn(slots)
        requests = [bench.request(bench.words(bench.args.prompt), bench.args.max_new) for _ in range(n)]
        begin = time.monotonic()
        alone = [slots.run(HIDDEN, r) for r in requests]
        middle = time.monotonic()
        together = [slots.begin(i, r) for i, r in enumerate(requests)]
        slots.finish()
        end = time.monotonic()
    rates = [sum(len(s.texts) for s in some) / t for some, t in ((alone, middle - begin), (together, end - middle))]
    print(f"one at a time {rates[0]:.1f} tok/s, {n} together {rates[1]:.1f} tok/s ({rates[1] / rates[0]:.2f}x)")
    bench.compare({f"slot {i}": s for i, s in enumerate(together)} | {f"GEN {i}": s for i, s in enumerate(alone)})
    return bench.end()


if __name__ == "__main__":
    guarded(main)
