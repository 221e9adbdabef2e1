"""What disks, administrators and other programs do to a store; each time requests go on, and it recovers by itself."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb
import pytest
from stratastore import PutOutcome, Reason, Store
from stratastore.medium import FORMAT_KEY
from stratastore.records import FORMAT_VERSION, format_record

from tests.store.support import Clock, Conversations, contents, open_store, whole

ROOT = Path(__file__).parents[2]
MAKE = Conversations(page_size=50_000)
FIRST, SECOND = MAKE.manifest(b"a", range(20)), MAKE.manifest(b"b", range(100, 120))


async def put(store: Store, manifest: object = FIRST) -> PutOutcome:
    return await store.put_conversation(manifest, MAKE.data)  # type: ignore[arg-type]


async def recovers(store: Store, clock: Clock) -> None:
    """After the time of one retry everything works again."""
    assert store.state.retry_in_s is not None
    clock.time += store.state.retry_in_s
    await store.tick()
    assert str(store.state) == "ok"
    assert await put(store, SECOND) is PutOutcome.STORED
    assert await contents(store, b"b") == [MAKE.data(ref) for ref in SECOND.pages]
    await whole(store)


@pytest.mark.parametrize("what", ["directory", "file", "replaced", "emptied", "cut"])
async def test_the_file_goes_away_under_the_running_store(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = Clock(), tmp_path / "s"
    async with await open_store(path, clock=clock) as store:
        await put(store)
        match what:
            case "directory":
                shutil.rmtree(path)
            case "file":
                (path / "store.mdb").unlink()
            case "replaced":
                shutil.copy(path / "store.mdb", path / "copy")
                os.replace(path / "copy", path / "store.mdb")
            case "emptied":
                os.truncate(path / "store.mdb", 0)
            case "cut":
                os.truncate(path / "store.mdb", 200_000)
        assert await contents(store, b"a") is None
        assert await put(store, SECOND) is PutOutcome.DEGRADED
        assert store.state.reason in (Reason.DELETED, Reason.TRUNCATED)
        for _ in range(20):
            assert await put(store, SECOND) is PutOutcome.DEGRADED
        assert len(caplog.records) == 1
        await recovers(store, clock)
        assert (await store.get(b"a") is not None) == (what == "replaced")
    assert (path / "store.mdb").stat().st_mode & 0o777 == 0o600


async def test_paths_that_cannot_be_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    for path in (tmp_path / "file", tmp_path / "file" / "s", tmp_path / "missing" / "s", tmp_path / ("x" * 300)):
        async with await open_store(path) as store:
            assert store.state.reason is Reason.UNUSABLE_PATH, path
            assert await put(store) is PutOutcome.DEGRADED
    assert (tmp_path / "file").read_text() == "not a directory"


async def test_a_directory_that_appears_later_is_used(tmp_path: Path) -> None:
    clock = Clock()
    async with await open_store(tmp_path / "later" / "s", clock=clock) as store:
        for expected in (1, 2, 4, 8, 16, 32, 60, 60):
            assert store.state.retry_in_s == expected
            clock.time += expected
            await store.tick()
        (tmp_path / "later").mkdir()
        await recovers(store, clock)


@pytest.mark.parametrize("content", [b"hello" * 5000, b"x", os.urandom(100_000)], ids=["text", "byte", "noise"])
async def test_a_foreign_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s"
    path.mkdir()
    (path / "store.mdb").write_bytes(content)
    async with await open_store(path) as store:
        assert store.state.reason is Reason.FOREIGN_FILE
        assert await put(store) is PutOutcome.DEGRADED
    assert (path / "store.mdb").read_bytes() == content


async def test_a_foreign_lmdb_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.mkdir()
    with lmdb.open(str(path / "store.mdb"), subdir=False, max_dbs=2) as environment:
        other = environment.open_db(b"other")
        with environment.begin(write=True) as txn:
            txn.put(b"precious", b"data", db=other)
    content = (path / "store.mdb").read_bytes()
    async with await open_store(path) as store:
        assert store.state.reason is Reason.FOREIGN_FILE
    assert (path / "store.mdb").read_bytes() == content


async def test_links_are_not_followed(tmp_path: Path) -> None:
    for name in ("store.mdb", "lock"):
        path, target = tmp_path / name, tmp_path / f"target of {name}"
        path.mkdir()
        target.write_bytes(b"")
        (path / name).symlink_to(target)
        async with await open_store(path) as store:
            assert store.state.reason is not None
        assert target.read_bytes() == b""


async def test_a_newer_format_is_left_alone_and_works_again_after_an_upgrade(tmp_path: Path) -> None:
    clock = Clock()
    async with await open_store(tmp_path / "s") as store:
        await put(store)

    def stamp(version: int) -> None:
        with lmdb.open(str(tmp_path / "s/store.mdb"), subdir=False, max_dbs=6) as environment:
            meta = environment.open_db(b"meta")
            with environment.begin(write=True) as txn:
                txn.put(FORMAT_KEY, format_record(FORMAT_KEY, version), db=meta)

    stamp(FORMAT_VERSION + 1)
    async with await open_store(tmp_path / "s", clock=clock) as store:
        assert store.state.reason is Reason.NEWER_FORMAT
        assert str(FORMAT_VERSION + 1) in str(store.state)
        assert await store.get(b"a") is None
        stamp(FORMAT_VERSION)
        clock.time += 1
        await store.tick()
        assert await contents(store, b"a") == [MAKE.data(ref) for ref in FIRST.pages]


def run_elsewhere(code: str, *prefix: str) -> None:
    """Run a test's body in a process of its own: limits, users and mounts are a process's."""
    program = f"import asyncio\nfrom tests.store.test_degraded import *\nasyncio.run({code})"
    run = subprocess.run(
        [*prefix, sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def body_file_limit(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    clock = Clock()
    async with await open_store(path, clock=clock) as store:
        await put(store)
        with file_limit(1_000_000):
            assert await put(store, SECOND) is PutOutcome.DEGRADED
            assert store.state.reason is not None
            clock.time += 1
            assert await put(store, SECOND) is PutOutcome.DEGRADED
        await recovers(store, clock)


def test_a_limit_of_the_files_size(tmp_path: Path) -> None:
    run_elsewhere(f"body_file_limit(Path({str(tmp_path / 's')!r}))")


async def body_full_disk(path: Path) -> None:
    """On a tmpfs of 6 MiB."""
    clock = Clock()
    async with await open_store(path / "s", 64, clock=clock) as store:
        (path / "ballast").write_bytes(bytes(2 << 20))
        outcomes = [await put(store, MAKE.manifest(b"%d" % n, range(100 * n, 100 * n + 20))) for n in range(30)]
        assert set(outcomes) == {PutOutcome.STORED}, outcomes  # by evicting: freed pages need no new space
        assert store._shared.counters.evictions > 10
        await store.drop_all()
        with (path / "ballast 2").open("wb", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        assert await put(store) is PutOutcome.DEGRADED
        assert store.state.reason is Reason.NO_SPACE, store.state
        clock.time += 1
        assert await put(store) is PutOutcome.DEGRADED
        assert await store.list() == []
        (path / "ballast").unlink()
        await recovers(store, clock)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], check=False).returncode:
        pytest.skip("no mount namespace to be had")
    script = 'mount -t tmpfs -o size=6m none "$0" && exec "$@"'
    run_elsewhere(f"body_full_disk(Path({str(tmp_path)!r}))", unshare, "-m", "sh", "-c", script, str(tmp_path))


async def body_read_only(path: Path) -> None:
    """`path` is a read-only mount that holds a store."""
    async with await open_store(path / "s") as store:
        assert store.state.reason is Reason.READ_ONLY, store.state
        assert await store.get(b"a") is None
        assert await put(store) is PutOutcome.DEGRADED


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
async def test_a_read_only_filesystem(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], check=False).returncode:
        pytest.skip("no mount namespace to be had")
    async with await open_store(tmp_path / "s") as store:
        await put(store)
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    run_elsewhere(f"body_read_only(Path({str(tmp_path)!r}))", unshare, "-m", "sh", "-c", script, str(tmp_path))


async def body_permissions(path: Path) -> None:
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    clock = Clock()
    (path / "s").mkdir(0o500)
    async with await open_store(path / "s", clock=clock) as store:
        assert store.state.reason is Reason.NO_PERMISSION, store.state
        (path / "s").chmod(0o700)
        await recovers(store, clock)
        (path / "s" / "store.mdb").chmod(0)
    async with await open_store(path / "s", clock=clock) as store:
        assert store.state.reason is Reason.NO_PERMISSION, store.state
        (path / "s" / "store.mdb").chmod(0o600)
        await recovers(store, clock)


def test_wrong_permissions(tmp_path: Path) -> None:
    path = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)) / f"strata-test-{os.getpid()}"
    path.mkdir()
    path.chmod(0o777)
    try:
        run_elsewhere(f"body_permissions(Path({str(path)!r}))")
    finally:
        shutil.rmtree(path)
