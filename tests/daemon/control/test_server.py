"""Abuse: whatever clients do, the others are served, and the one at fault is told why and hung up on."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stratad.control import Limits, interface
from stratad.control.wire import MESSAGE_LIMIT

from tests.daemon.control.support import Daemon, Raw, running

NAME = "io.strata.Control"
VIOLATION = f"{NAME}.ProtocolViolation"
FULL = {"error": f"{NAME}.TooManyConnections", "parameters": {"limit": 32}}


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that has no patience."""
    with running(tmp_path / "hasty.sock", Limits(idle_s=0.3, write_s=0.3, refused_s=0.2)) as made:
        yield made


def works(daemon: Daemon) -> bool:
    with Raw(daemon.path) as client:
        return "parameters" in client.call(f"{NAME}.Status")


def soon(condition: Callable[[], bool]) -> bool:
    """Whether `condition` comes true within some seconds."""
    deadline = time.monotonic() + 8
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def idle(daemon: Daemon) -> bool:
    return soon(lambda: daemon.server.connections == 0)


# --- messages ---


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"\0", "not JSON"),
        (b"{]\0", "not JSON"),
        (b"GET / HTTP/1.1\r\n\r\n\0", "not JSON"),
        (b"\xff\xff\0", "not JSON"),
        (b"[" * 100_000 + b"\0", "deeper than 64"),
        (b'{"method":"x"}\0', "not a Varlink call"),
        (b"x" * (MESSAGE_LIMIT + 1) + b"\0", "larger than 1048576 bytes"),
    ],
)
def test_a_bad_message_is_answered_and_the_line_cut(daemon: Daemon, message: bytes, words: str) -> None:
    with Raw(daemon.path) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.send(message)
        reply = client.reply()
        assert reply["error"] == VIOLATION and words in reply["parameters"]["message"]
        assert client.reply() == {}
    assert idle(daemon) and works(daemon)


def test_nothing_after_a_bad_message_is_obeyed(daemon: Daemon) -> None:
    with Raw(daemon.path) as client:
        client.send(b'nonsense\0{"method":"io.strata.Control.Status"}\0')
        assert client.reply()["error"] == VIOLATION
        assert client.reply() == {}


def test_a_message_of_the_largest_size_is_taken(daemon: Daemon) -> None:
    call = json.dumps({"method": f"{NAME}.Get", "parameters": {"names": ["x"]}}).encode()
    with Raw(daemon.path) as client:
        client.send(call + b" " * (MESSAGE_LIMIT - len(call)) + b"\0")
        assert client.reply()["error"] == f"{NAME}.NotFound"


def test_a_line_of_100_mb_costs_neither_memory_nor_service(daemon: Daemon) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sent = 0
    with Raw(daemon.path) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                client.send(b"x" * 1_000_000)
                sent += 1
        assert "larger than" in client.reply()["parameters"]["message"]
    assert sent < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB
    assert idle(daemon) and works(daemon)


def test_calls_are_answered_in_order_however_they_are_cut(daemon: Daemon) -> None:
    calls = b"".join(
        json.dumps({"method": f"{NAME}.Get", "parameters": {"names": [f"n{number}"]}}).encode() + b"\0"
        for number in range(5)
    )
    with Raw(daemon.path) as client:
        for start in range(0, len(calls), 7):
            client.send(calls[start : start + 7])
        assert [client.reply()["parameters"]["parameter"] for _ in range(5)] == [f"n{number}" for number in range(5)]


def test_two_interfaces_on_one_connection(daemon: Daemon) -> None:
    with Raw(daemon.path) as client:
        assert client.call("org.varlink.service.GetInfo")["parameters"]["product"] == "stratad"
        assert client.call(f"{NAME}.Version")["parameters"]["protocol"] == 1
        assert client.call("org.varlink.service.GetInfo")["parameters"]["product"] == "stratad"


def test_oneway_calls_have_no_answer(daemon: Daemon) -> None:
    with Raw(daemon.path) as client:
        client.send({"method": f"{NAME}.Status", "oneway": True})
        client.send({"method": f"{NAME}.Nothing", "oneway": True})
        assert client.call(f"{NAME}.Version")["parameters"]["protocol"] == 1


def test_upgrade_is_refused(daemon: Daemon) -> None:
    with Raw(daemon.path) as client:
        assert client.call(f"{NAME}.Status", upgrade=True)["error"] == "org.varlink.service.MethodNotImplemented"


# --- time ---


@pytest.mark.parametrize("start", [b"", b'{"method":"io.strata'])
def test_a_silent_client_is_hung_up_on(hasty: Daemon, start: bytes) -> None:
    with Raw(hasty.path) as client:
        client.send(start)
        assert "within 0.3 seconds" in client.reply()["parameters"]["message"]
        assert client.reply() == {}
    assert idle(hasty)


def test_a_trickle_does_not_extend_the_time(hasty: Daemon) -> None:
    started = time.monotonic()
    with Raw(hasty.path) as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(100):
            client.send(b" ")
            time.sleep(0.05)
    assert time.monotonic() - started < 3


def test_a_watching_client_is_not_idle(hasty: Daemon) -> None:
    with Raw(hasty.path) as client:
        client.send({"method": f"{NAME}.Watch", "more": True, "parameters": {"interval_ms": 50}})
        client.reply()
        time.sleep(0.6)
        hasty.service.ready()
        assert client.reply()["parameters"]["state"] == "ready"


def test_a_client_that_never_reads_is_given_up(hasty: Daemon) -> None:
    hasty.service.snapshot["filler"] = "x" * 500_000
    with Raw(hasty.path) as client:
        for _ in range(4):
            client.send({"method": f"{NAME}.Status"})
        assert soon(lambda: hasty.server.connections == 1)
        assert idle(hasty)
    assert works(hasty)


# --- number ---


def test_the_33rd_client_is_told_so(daemon: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Raw(daemon.path)) for _ in range(32)]
        assert all("parameters" in client.call(f"{NAME}.Version") for client in clients)
        extra = stack.enter_context(Raw(daemon.path))
        assert extra.call(f"{NAME}.Status") == FULL
        assert extra.reply() == {}
        clients[0].sock.close()
        assert soon(lambda: daemon.server.connections == 31)
        assert works(daemon)


def test_500_connections(daemon: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Raw(daemon.path)) for _ in range(500)]
        refused = [client.reply() for client in clients[32:]]
        assert refused == [FULL] * 468
        assert "parameters" in clients[0].call(f"{NAME}.Status")
    assert idle(daemon) and works(daemon)


def test_out_of_descriptors_clients_are_still_told(daemon: Daemon) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        client = Raw.__new__(Raw)  # its socket must exist before descriptors run out
        client._received = b""
        client.sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        client.sock.settimeout(10)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        for _ in range(highest - len(os.listdir("/proc/self/fd")) + 3):  # fill the gaps below the limit
            stack.enter_context(open(os.devnull, "rb"))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
            client.sock.connect(daemon.path)
            assert client.reply()["error"] == f"{NAME}.TooManyConnections"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert works(daemon)


# --- ends ---


def test_a_client_that_dies_in_mid_watch_ends_it(daemon: Daemon) -> None:
    for _ in range(3):
        with Raw(daemon.path) as client:
            client.send({"method": f"{NAME}.Watch", "more": True, "parameters": {"interval_ms": 60_000}})
            client.reply()
        started = time.monotonic()
        assert idle(daemon)
        assert time.monotonic() - started < 1, "at once, not at the next word"
    assert works(daemon)


def test_a_client_that_only_stops_sending_still_gets_its_answers(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "SPEAK_EVERY_S", 0.5)
    with Raw(daemon.path) as client:
        client.send({"method": f"{NAME}.Watch", "more": True, "parameters": {"interval_ms": 50}})
        client.sock.shutdown(socket.SHUT_WR)
        assert client.reply()["parameters"]["state"] == "loading"
        time.sleep(0.1)
        daemon.service.ready()
        assert client.reply()["parameters"]["state"] == "ready"
    assert idle(daemon)


def test_a_client_that_dies_in_mid_message(daemon: Daemon) -> None:
    with Raw(daemon.path) as client:
        client.send(b'{"method":"io.')
    assert idle(daemon) and works(daemon)


def test_stop_hangs_up_and_removes_the_file(tmp_path: Path) -> None:
    with running(tmp_path / "control.sock") as daemon, Raw(daemon.path) as waiting, Raw(daemon.path) as half:
        waiting.call(f"{NAME}.Status")
        half.send(b"{")
        started = time.monotonic()
        daemon.close()
        assert time.monotonic() - started < 1
        assert waiting.reply() == {} and half.reply() == {}
        assert not os.path.exists(daemon.path)
        daemon.close()  # again: nothing to do


def test_stop_does_not_wait_for_a_client_that_never_reads(tmp_path: Path) -> None:
    with running(tmp_path / "control.sock") as daemon, Raw(daemon.path) as client:
        daemon.service.snapshot["filler"] = "x" * 500_000
        for _ in range(4):
            client.send({"method": f"{NAME}.Status"})
        time.sleep(0.1)
        started = time.monotonic()
        daemon.close()
        assert time.monotonic() - started < 5
        assert daemon.server.connections == 0


def test_restarts_with_living_clients(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    stop = threading.Event()

    def hammer() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), Raw(path) as client:
                client.call(f"{NAME}.Status")
            time.sleep(0.001)

    threads = [threading.Thread(target=hammer) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            with running(path) as daemon:
                assert works(daemon)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
