"""What /metrics says: the text as a parser of its own reads it, the JSON, and counters that never go down."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re

import pytest
from stratad import metrics
from stratad.child import Command
from stratad.metrics import METRICS, View
from stratad.scheduler import Scheduler
from stratad.settings import Effective, Settings
from stratad.storage import Storage
from stratad.supervisor import Supervisor
from stratad.tally import Histogram
from stratad.types import GenRequest, Sampling

from tests.daemon.virtual import World, settle

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

LABEL = re.compile(r'([a-z_]+)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"')
SAMPLE = re.compile(r"([a-z_]+)(?:\{(.*)\})? (\S+)")


def parse(text: str) -> Samples:
    """The samples of a text in format 0.0.4, strictly: every name has HELP and TYPE before it, once."""
    samples: Samples = {}
    types: dict[str, str] = {}
    helped: set[str] = set()
    assert text.endswith("\n") and "\r" not in text
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in helped
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name in helped and name not in types and kind in ("counter", "gauge", "histogram")
            types[name] = kind
        else:
            _take(line, samples, types)
    return samples


def _take(line: str, samples: Samples, types: dict[str, str]) -> None:
    match = SAMPLE.fullmatch(line)
    assert match, line
    name, inner, value = match[1], match[2] or "", float(match[3])
    labels = LABEL.findall(inner)
    assert ",".join(f'{key}="{text}"' for key, text in labels) == inner, line
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    assert name in types or types.get(base) == "histogram", line
    assert types.get(name) != "counter" or name.endswith("_total")
    assert math.isfinite(value)
    key = (name, tuple((label, text.replace(r"\"", '"').replace(r"\n", "\n").replace("\\\\", "\\"))
                       for label, text in labels))  # fmt: skip
    assert key not in samples, line
    samples[key] = value


class Case:
    """A daemon's parts in virtual time."""

    def __init__(self, **values: str) -> None:
        self.world = World()
        self.settings = Settings({name: Effective(value) for name, value in values.items()})
        self.scheduler = Scheduler(self.settings, self.world.effects())
        self.supervisor = Supervisor(
            lambda: Command(["engine"], {}), self.settings, self.world.effects(), self.scheduler
        )
        self.scheduler.attach(self.supervisor)
        self.storage = Storage(self.settings, {}, self.world.time.now)

    def view(self) -> View:
        return View(self.settings, self.supervisor, self.scheduler, self.storage, 12.5)

    def samples(self) -> Samples:
        assert json.loads(json.dumps(metrics.snapshot(self.view())))["uptime_s"] == 12.5
        return parse(metrics.text(self.view()))


async def test_it_parses_in_every_state_and_counters_never_go_down() -> None:
    case = Case(model_name='a "name"\\ with\na break')
    seen = [case.samples()]
    assert ("strata_max_context", ()) not in seen[0]
    task = asyncio.create_task(case.supervisor.run())
    await settle()
    seen.append(case.samples())
    case.world.child.say("INFO engine=0.1.0 batch_slots=2", "READY 2048 stop")
    await settle()
    seen.append(case.samples())
    requests = [case.scheduler.submit(GenRequest((1, 2, number), 5, Sampling())) for number in range(3)]
    case.world.child.say("BRESUME 0 1", "BPP 0 3 3 1 2", "BADM 0 1", "BT 0 7", "BT 0 8")
    seen.append(case.samples())
    await case.world.time.advance(0.03)
    case.world.child.say("BT 0 9", "BDONE 0 3 stop 9 3 4 3 1 4 5 2")
    case.world.child.say('STAT {"windows": 9, "pool": {"blocks": 5, "parked": true}}')
    seen.append(case.samples())
    case.world.child.exit(-9)
    seen.append(case.samples())
    await case.world.time.advance(0.1)
    case.world.child.say("INFO batch_slots=1", "READY 2048 stop")
    seen.append(case.samples())
    for before, after in itertools.pairwise(seen):
        for key, value in before.items():
            if key[0].endswith(("_total", "_count", "_bucket", "_sum")):
                assert after[key] >= value, key
    alive, dead, last = seen[4], seen[5], seen[6]
    info = next(dict(labels) for name, labels in alive if name == "strata_info")
    assert info["model"] == 'a "name"\\ with\na break' and info["engine"] == "0.1.0"
    assert alive["strata_slots", (("state", "reading"),)] == 2 and dead["strata_requests_running", ()] == 2
    assert alive["strata_engine_windows", ()] == 9 and alive["strata_pool_blocks", ()] == 5
    assert ("strata_engine_parked", ()) not in alive  # no number, so not known
    assert alive["strata_draft_tokens_accepted_total", (("slot", "0"),)] == 3
    assert alive["strata_requests_total", (("finish", "stop"),)] == 1
    assert alive["strata_first_token_seconds_count", ()] == 1
    assert alive["strata_token_gap_seconds_bucket", (("le", "0.001"),)] == 1  # two that came together
    assert alive["strata_token_gap_seconds_bucket", (("le", "0.04"),)] == 2
    assert alive["strata_token_gap_seconds_bucket", (("le", "+Inf"),)] == 2
    assert last["strata_engine_restarts_total", ()] == 1 and last["strata_slots", (("state", "reading"),)] == 1
    assert last["strata_requests_recovered_total", ()] == 2
    for generation in requests:
        await generation.cancel()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_json_form() -> None:
    case = Case()
    snapshot = metrics.snapshot(case.view())
    live = snapshot["live"]
    assert isinstance(live, dict) and (live["state"], live["slots"], live["parallel"]) == ("unloaded", [], 0)
    assert set(snapshot) == {"engine", "live", "drafts", "rates", "latency", "requests", "totals", "uptime_s"}


def test_histogram() -> None:
    histogram = Histogram((0.1, 1.0))
    assert histogram.quantile(0.5) is None
    for seconds in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(seconds)
    assert histogram.counts == [2, 1, 1] and histogram.count == 4 and histogram.sum == pytest.approx(7.65)
    assert [histogram.quantile(share) for share in (0.5, 0.75, 0.99)] == [0.1, 1.0, 1.0]


def test_the_table_is_sound() -> None:
    names = [metric.full_name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"strata_[a-z_]+", metric.full_name) and metric.help.endswith(".")
        assert not re.search(r"_(total|count|sum|bucket)$", metric.name)
