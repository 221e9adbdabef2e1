"""What the machine is and what else it does: facts, foreign load, processor time and memory of a process (Linux)."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "native" / "models" / "strata-tiny-moe-Q4_0.gguf"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
POLL_S = 0.25
FEATURES = ("avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8")


@dataclass(frozen=True)
class Ticks:
    """Processor time of the whole machine since boot, in ticks."""

    busy: int  # anything that ran here, also at a low priority
    steal: int  # what the hypervisor gave to others

    @classmethod
    def parse(cls, stat: str) -> Ticks:
        """From the first line of /proc/stat: user nice system idle iowait irq softirq steal guest guest_nice."""
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.split("\n", 1)[0].split()[1:9])
        return cls(user + nice + system + irq + softirq, steal)

    @classmethod
    def now(cls) -> Ticks:
        """The present count."""
        return cls.parse(Path("/proc/stat").read_text())


@dataclass(frozen=True)
class Process:
    """One line of /proc/PID/stat, as far as needed here."""

    pid: int
    parent: int
    own: int  # user and system ticks of all its threads
    reaped: int  # those of children it has waited for

    @classmethod
    def parse(cls, stat: str) -> Process:
        """The name, in brackets, may hold anything; what counts comes after the last one."""
        pid = int(stat.split(" ", 1)[0])
        words = stat.rpartition(")")[2].split()
        user, system, children_user, children_system = map(int, words[11:15])
        return cls(pid, int(words[1]), user + system, children_user + children_system)


def _processes() -> Iterable[Process]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                yield Process.parse(Path("/proc", entry, "stat").read_text())


def family(root: int, processes: Iterable[Process]) -> list[Process]:
    """`root` and everything it has started that still runs, also by way of others."""
    children: dict[int, list[Process]] = {}
    found = []
    for process in processes:
        children.setdefault(process.parent, []).append(process)
        if process.pid == root:
            found.append(process)
    for process in found:  # grows meanwhile
        found += children.get(process.pid, ())
    return found


def family_ticks(root: int, processes: Iterable[Process]) -> int:
    """Ticks of `root` and everything it has started, ended or not."""
    return sum(process.own + process.reaped for process in family(root, processes))


def descendants(root: int) -> list[int]:
    """The process ids of `root` and everything it has started that still runs."""
    return [process.pid for process in family(root, _processes())]


class Company:
    """What other programs and the hypervisor take of this machine while we measure."""

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self.start()

    def start(self) -> None:
        """Begin to count."""
        self._began, self._ticks, self._own = time.monotonic(), Ticks.now(), family_ticks(os.getpid(), _processes())

    def foreign_share(self) -> float:
        """What others took of the machine since `start`, 0..1."""
        ticks, own = Ticks.now(), family_ticks(os.getpid(), _processes())
        foreign = (ticks.busy - self._ticks.busy) - (own - self._own) + (ticks.steal - self._ticks.steal)
        elapsed = max(time.monotonic() - self._began, TICK_S)
        return min(1.0, max(0.0, foreign * TICK_S / (elapsed * self._cores)))

    def wait_for_quiet(self, limit_s: float, allowed: float) -> None:
        """Return when others take no more than `allowed` of the machine, or after `limit_s`."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            self.start()
            time.sleep(POLL_S)
            if self.foreign_share() <= allowed:
                return


@contextlib.contextmanager
def priority(nice: int) -> Iterator[None]:
    """Run everything that is started meanwhile at this nice value, 0 changing nothing.

    Where the kernel shares the processors among login sessions first (autogroup), only the session's value counts, so
    that is set too. Raises PermissionError where the right is missing.
    """
    session = Path("/proc/self/autogroup")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    try:
        session_before = session.read_text().split()[-1] if nice and session.exists() else ""
        if session_before:
            session.write_text(str(nice))
        yield
    finally:
        if nice:
            os.setpriority(os.PRIO_PROCESS, 0, before)
        if session_before:
            session.write_text(session_before)


def share_priority(pid: int) -> None:
    """Give our session's nice value to the sessions that `pid` or what it has started has opened: see `priority`."""
    with contextlib.suppress(OSError):
        ours = Path("/proc/self/autogroup").read_text().split()[-1]
        for member in descendants(pid):
            session = Path(f"/proc/{member}/autogroup")
            if session.read_text().split()[-1] != ours:
                session.write_text(ours)


def peak_mib(pid: int) -> float:
    """Largest resident set that `pid` has had, in MiB; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


def cpu_s(pid: int) -> float:
    """Processor time of `pid`, all its living threads, in seconds.

    The scheduler's own count is exact; /proc/PID/stat, where there is no such count, is rounded to ticks.
    """
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) * 1e-9
    except OSError:
        return Process.parse(Path(f"/proc/{pid}/stat").read_text()).own * TICK_S


def cpu_model(cpuinfo: str) -> tuple[str, list[str]]:
    """The processor's name and those of its features that decide about kernels, from /proc/cpuinfo."""
    rows = dict(part for line in cpuinfo.splitlines() if len(part := line.split("\t: ", 1)) == 2)
    fields = {name.strip(): value for name, value in rows.items()}
    flags = set(fields.get("flags", "").split())
    return fields.get("model name", platform.machine()), [name for name in FEATURES if name in flags]


def commit() -> str:
    """The commit that is measured, with `+` where the sources differ from it."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "native", "daemon")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def load() -> str:
    """The load averages of the last 1, 5 and 15 minutes."""
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def facts() -> dict[str, str]:
    """Facts that a reader needs to judge the figures."""
    name, features = cpu_model(Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "processor": f"{name}, {os.cpu_count()} cores, {' '.join(features) or 'no vector features known here'}",
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load before": load(),
    }
