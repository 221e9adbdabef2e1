"""The socket file: rights, what it may replace, what it must leave alone."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from stratad.control.unixsocket import PATH_LIMIT, BoundSocket, bind
from stratad.errors import StrataError


@pytest.fixture(params=[0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


async def refused(path: str | Path, group: str | int | None = None) -> StrataError:
    with pytest.raises(StrataError) as caught:
        await bind(path, group)
    assert caught.value.name == "control_socket" and caught.value.param == "control"
    return caught.value


def stale(path: Path) -> None:
    """A socket file that nobody listens on, as a killed daemon leaves it."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


async def test_mode_of_socket_and_new_folder(tmp_path: Path, umask: int) -> None:
    bound = await bind(tmp_path / "run" / "control.sock")
    assert stat.S_IMODE(os.stat(bound.path).st_mode) == 0o660
    assert stat.S_IMODE(os.stat(tmp_path / "run").st_mode) == 0o750
    assert os.umask(umask) == umask, "the umask is put back"
    bound.remove()


async def test_a_folder_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o711)
    (await bind(tmp_path / "run" / "control.sock")).remove()
    assert stat.S_IMODE(os.stat(tmp_path / "run").st_mode) == 0o711


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another group needs root")
async def test_group_of_socket_and_new_folder(tmp_path: Path) -> None:
    bound = await bind(tmp_path / "run" / "control.sock", 12345)
    assert bound.gid == os.stat(bound.path).st_gid == os.stat(tmp_path / "run").st_gid == 12345
    bound.remove()


async def test_nobody_can_connect_before_the_rights_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def chmod(path: str, mode: int) -> None:
        modes.append(stat.S_IMODE(os.stat(path).st_mode))
        with socket.socket(socket.AF_UNIX) as early, pytest.raises(ConnectionRefusedError):
            early.connect(str(path))

    monkeypatch.setattr(os, "chmod", chmod)
    (await bind(tmp_path / "control.sock")).remove()
    assert modes == [0o600]


async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    stale(path)
    bound = await bind(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    bound.remove()


async def test_a_living_socket_is_left_and_its_owner_named(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    first = await bind(path)
    inode = os.stat(path).st_ino
    assert f"in use by process {os.getpid()}" in (await refused(path)).message
    assert os.stat(path).st_ino == inode
    first.remove()


async def test_a_socket_with_a_full_backlog_counts_as_living(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(path))
        busy.listen(0)
        waiting.connect(str(path))
        assert "in use by another process" in (await refused(path)).message


@pytest.mark.parametrize("kind", ["file", "folder", "link", "fifo"])
async def test_what_is_not_a_socket_is_never_removed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "control.sock"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        stale(tmp_path / "target")
        path.symlink_to(tmp_path / "target")
    before = os.lstat(path)
    assert "not a socket" in (await refused(path)).message
    assert os.lstat(path).st_ino == before.st_ino


async def test_path_length_is_checked_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (await bind("a" * PATH_LIMIT)).remove()
    assert "has 108 bytes; it must have 1 to 107" in (await refused("a" * (PATH_LIMIT + 1))).message
    assert "has 108 bytes" in (await refused("\u00e9" * 54)).message
    assert "1 to 107" in (await refused("")).message
    assert "NUL" in (await refused("a\0b")).message


async def test_a_bad_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in (await refused(tmp_path / "file" / "control.sock")).message


async def test_an_unknown_group_leaves_nothing_behind(tmp_path: Path) -> None:
    assert "'no-such-group' does not exist" in (await refused(tmp_path / "run" / "c.sock", "no-such-group")).message
    assert list(tmp_path.iterdir()) == []


async def test_a_failure_after_bind_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chmod(path: str, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", chmod)
    assert "Operation not permitted" in (await refused(tmp_path / "control.sock")).message
    assert list(tmp_path.iterdir()) == []


async def test_only_our_own_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    first = await bind(path)
    path.rename(tmp_path / "moved")
    second = await bind(path)
    first.remove()
    assert path.exists()
    second.remove()
    assert not path.exists()


async def test_of_daemons_that_start_together_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    stale(path)
    results = await asyncio.gather(*(bind(path) for _ in range(8)), return_exceptions=True)
    winners = [result for result in results if isinstance(result, BoundSocket)]
    losers = [result for result in results if isinstance(result, StrataError)]
    assert (len(winners), len(losers)) == (1, 7)
    assert os.stat(path).st_ino == winners[0].inode[1]
    winners[0].remove()
