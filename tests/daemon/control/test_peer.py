"""Who may call what."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from asyncvarlink import VarlinkInterface, varlinkmethod, varlinksignature
from asyncvarlink.serviceinterface import VarlinkServiceInterface
from stratad.control.interface import Control
from stratad.control.peer import ADMIN_GROUP, METHODS, Access, Peer, Policy, access_of, peer_of

from tests.daemon.control.support import Daemon, Raw, running

POLICY = Policy(service_uid=100, read_gid=200, admin_gid=300)


@pytest.mark.parametrize(
    ("peer", "read", "change"),
    [
        (Peer(0, 1, (0,)), True, True),
        (Peer(100, 1, (999,)), True, True),
        (Peer(1000, 1, (200,)), True, False),
        (Peer(1000, 1, (1000, 4, 200)), True, False),
        (Peer(1000, 1, (1000, 300)), True, True),
        (Peer(1000, 1, (1000,)), False, False),
    ],
)
def test_classes(peer: Peer, read: bool, change: bool) -> None:
    assert (POLICY.allows(peer, Access.READ), POLICY.allows(peer, Access.CHANGE)) == (read, change)


def test_without_an_admin_group_only_root_and_the_service_change() -> None:
    policy = Policy(100, 200, None)
    assert policy.allows(Peer(100, 1, ()), Access.CHANGE)
    assert not policy.allows(Peer(1000, 1, (200,)), Access.CHANGE)


def test_every_method_is_in_the_table_and_the_rest_counts_as_change() -> None:
    interfaces: tuple[type[VarlinkInterface], ...] = (Control, VarlinkServiceInterface)
    methods = {f"{made.name}.{name}" for made in interfaces for name in dir(made) if is_method(getattr(made, name))}
    assert methods == METHODS.keys()
    assert access_of("io.strata.Control.Erase") is Access.CHANGE


def is_method(thing: object) -> bool:
    return callable(thing) and varlinksignature(thing) is not None


def test_credentials_are_the_kernels() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        peer = peer_of(ours)
    assert (peer.uid, peer.pid, peer.groups[0]) == (os.geteuid(), os.getpid(), os.getegid())
    assert set(peer.groups) == {os.getegid(), *os.getgroups()}
    assert str(peer) == f"uid={os.geteuid()} pid={os.getpid()}"


class Changing(VarlinkInterface, name="io.strata.Test"):
    """A method that is missing from the table."""

    @varlinkmethod(return_parameter="ok")
    def Erase(self) -> bool:
        return True


PROGRAM = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(10)
try:
    sock.connect(sys.argv[1])
    sock.sendall(b'{"method":"%s"}\\0' % sys.argv[2].encode())
    print(sock.recv(65536).rstrip(b"\\0").decode())
except PermissionError:
    print('{"error":"connect"}')
"""
READERS, OUTSIDER = 54321, 54322


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon for the group READERS, in a folder that every user can reach, with a method that changes things."""
    folder = tempfile.mkdtemp(prefix="strata-")
    os.chmod(folder, 0o755)
    monkeypatch.setattr("stratad.control.interface.VarlinkServiceInterface", lambda *_: Changing())
    with running(Path(folder) / "control.sock", group=READERS) as daemon:
        yield daemon
    shutil.rmtree(folder)


def ask(daemon: Daemon, method: str, *, group: int, extra: list[int]) -> dict[str, object]:
    """What a process of another user gets for `method`."""
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "-c", PROGRAM, daemon.path, method],
        user=OUTSIDER,
        group=group,
        extra_groups=extra,
        capture_output=True,
        check=True,
        cwd="/",
        timeout=20,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/usr/bin/python3", os.X_OK), reason="becoming another user needs root"
)
def test_other_users(shared: Daemon) -> None:
    assert ask(shared, "io.strata.Control.Status", group=OUTSIDER, extra=[]) == {"error": "connect"}
    for group, extra in ((READERS, []), (OUTSIDER, [READERS])):
        assert "parameters" in ask(shared, "io.strata.Control.Status", group=group, extra=extra)
        denied = ask(shared, "io.strata.Test.Erase", group=group, extra=extra)
        assert denied["error"] == "io.strata.Control.PermissionDenied"
        assert denied["parameters"] == {
            "method": "io.strata.Test.Erase",
            "needs": f"root, the service user, or membership in the group {ADMIN_GROUP}",
        }
    assert ask_as_root(shared) == {"parameters": {"ok": True}}


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_rights_are_checked_even_where_the_file_would_let_in(shared: Daemon) -> None:
    os.chmod(shared.path, 0o666)
    denied = ask(shared, "io.strata.Control.Status", group=OUTSIDER, extra=[])
    assert denied["error"] == "io.strata.Control.PermissionDenied"


def ask_as_root(daemon: Daemon) -> dict[str, object]:
    with Raw(daemon.path) as client:
        return client.call("io.strata.Test.Erase")
