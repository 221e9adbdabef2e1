"""Facts about the machine, from recorded files of /proc and from this process itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.machine import (
    TICK_S,
    Company,
    Process,
    Ticks,
    cpu_model,
    cpu_s,
    descendants,
    facts,
    family_ticks,
    peak_mib,
    priority,
)

STAT = "cpu  77893 239083 28532 302149 1009 3 520 302 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n"
LINE = "{pid} (a ) b) R {parent} 1 1 0 -1 4194560 1 0 0 0 {user} {system} {cuser} {csystem} 20 0 1 0 1 1 1\n"


def process(pid: int, parent: int, *ticks: int) -> Process:
    user, system, cuser, csystem = ticks
    return Process.parse(LINE.format(pid=pid, parent=parent, user=user, system=system, cuser=cuser, csystem=csystem))


def test_busy_counts_everything_that_ran_and_steal_by_itself() -> None:
    assert Ticks.parse(STAT) == Ticks(77893 + 239083 + 28532 + 3 + 520, 302)


def test_a_process_name_may_hold_brackets_and_blanks() -> None:
    assert process(7, 3, 10, 20, 30, 40) == Process(7, 3, 30, 70)


def test_a_family_is_everything_that_was_started_ended_or_not() -> None:
    others = [process(9, 8, 1, 0, 0, 0), process(8, 1, 10, 0, 100, 0), process(7, 8, 1000, 0, 0, 0)]
    strangers = [process(1, 0, 5, 5, 5, 5), process(20, 1, 7, 7, 7, 7)]
    assert family_ticks(8, [*others, *strangers]) == 1111
    assert family_ticks(99, strangers) == 0


def own_ticks() -> int:
    return family_ticks(os.getpid(), [Process.parse(Path("/proc/self/stat").read_text())])


def test_the_work_of_ended_children_is_ours_and_not_foreign() -> None:
    company, before = Company(), own_ticks()
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    assert (own_ticks() - before) * TICK_S >= 0.25
    assert 0.0 <= company.foreign_share() <= 1.0


def test_descendants_end_with_their_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert {os.getpid(), child.pid} <= set(descendants(os.getpid()))
        child.communicate(b"\n")
    assert child.pid not in descendants(os.getpid())


def test_processor_time_and_memory_of_this_process() -> None:
    used, end = cpu_s(os.getpid()), time.thread_time() + 0.1
    while time.thread_time() < end:
        pass
    assert cpu_s(os.getpid()) - used >= 0.08
    assert peak_mib(os.getpid()) > 5
    assert peak_mib(2**22 - 1) == 0


def test_the_processor_has_a_name_and_the_features_that_kernels_ask_for() -> None:
    text = "processor\t: 0\nmodel name\t: Some CPU @ 2: fast\nflags\t\t: fpu avx2 fma sse2 avx512_vnni\n"
    assert cpu_model(text) == ("Some CPU @ 2: fast", ["avx2", "fma", "avx512_vnni"])
    assert cpu_model("")[1] == []


def test_facts_name_what_a_reader_needs() -> None:
    assert {"date", "commit", "processor", "memory", "load before"} <= facts().keys()


def test_priority_0_changes_nothing_and_a_missing_right_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    with priority(0):
        pass
    with pytest.raises(PermissionError), priority(-5):
        pytest.fail("went on without the right")
