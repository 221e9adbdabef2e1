from __future__ import annotations

import asyncio
import json
import re

from stratad import status
from stratad.child import Command
from stratad.scheduler import Scheduler
from stratad.settings import Effective, Settings
from stratad.storage import Storage
from stratad.supervisor import Supervisor
from stratad.types import GenRequest, Sampling

from tests.daemon.virtual import World, settle


class Case:
    """A daemon's parts in virtual time."""

    def __init__(self) -> None:
        self.world = World()
        self.settings = Settings({"stall_limit_s": Effective(60.0, "file", "strata.toml:1")})
        self.scheduler = Scheduler(self.settings, self.world.effects())
        self.supervisor = Supervisor(
            lambda: Command(["engine"], {}), self.settings, self.world.effects(), self.scheduler
        )
        self.scheduler.attach(self.supervisor)
        self.storage = Storage(self.settings, {}, self.world.time.now)

    def now(self) -> dict[str, object]:
        snapshot = status.snapshot(self.settings, self.supervisor, self.scheduler, self.storage, ["[::1]:8080"], 12.345)
        assert json.loads(json.dumps(snapshot)) == snapshot
        return snapshot


async def test_the_snapshot_in_every_state() -> None:
    case = Case()
    assert case.now()["state"] == "stopped"
    task = asyncio.create_task(case.supervisor.run())
    await settle()
    assert case.now()["state"] == "starting"
    case.world.child.say("INFO arch=qwen35moe identity=aa fingerprint=bb trained_context=4096", "INFO load_percent=41")
    assert (case.now()["concurrency"], case.now()["slots"]) == ({"serving": 0, "requested": 4}, [])
    assert (case.now()["state"], case.now()["state_detail"]) == ("loading", "loading the model, 41 %")
    case.world.child.say("INFO batch_slots=2", "READY 2048 stop")
    await settle()
    ready = case.now()
    assert (ready["state"], ready["state_detail"], ready["uptime_s"]) == ("ready", "", 12.3)
    assert ready["listeners"] == ["[::1]:8080"] and ready["settings"] == {"stall_limit_s": 60.0}
    model = ready["model"]
    assert isinstance(model, dict)
    assert (model["arch"], model["context"], model["trained_context"]) == ("qwen35moe", 2048, 4096)

    assert (ready["concurrency"], ready["slots"]) == (
        {"serving": 2, "requested": 4},
        [{"slot": slot, "state": "idle", "held_tokens": 0} for slot in (0, 1)],
    )

    await case.world.time.advance(20)
    assert case.now()["state_detail"] == ""  # an idle engine has nothing to say
    case.scheduler.submit(GenRequest((1, 2), 5, Sampling()))
    await case.world.time.advance(20)
    assert case.now()["state_detail"] == "the engine has been silent for 20 s"
    case.scheduler.draining = True
    case.world.child.say("BRESUME 0 0", "BT 0 5")
    assert (case.now()["state"], case.now()["state_detail"]) == ("draining", "waiting for running answers to end")
    case.scheduler.draining = False

    case.world.child.exit(-9)
    down = case.now()
    assert (down["state"], down["state_detail"]) == ("restarting", "the engine ended: killed by SIGKILL")
    engine, requests = down["engine"], down["requests"]
    assert isinstance(engine, dict) and isinstance(requests, dict)
    assert engine["pid"] is None and engine["last_exit"]["signal"] == 9
    assert (requests["failed"], requests["running"]) == (0, 1)  # it will go on
    assert isinstance(down["model"], dict) and down["model"]["context"] == 2048  # still known

    await case.world.time.advance(1)
    case.world.child.exit(78)
    await settle()
    assert case.now()["state"] == "failed" and "exit code 78" in str(case.now()["state_detail"])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_table_in_the_docstring_is_complete() -> None:
    rows = re.findall(r"^\| ([a-z_, ]+) \|", status.__doc__ or "", re.MULTILINE)
    documented = {key.strip() for row in rows for key in row.split(",")} - {"key"}
    assert documented == set(Case().now())
