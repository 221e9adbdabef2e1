"""Images of conversations from the daemon's side: the format of native/IMAGES.md written down a second time, and the
other end of an engine's bulk socket."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from strata_native import ffi, lib

from tests.exactness.slots import Slots
from tests.native.driver import MODEL, PATIENCE

PAGE = 256
MAIN, DRAFTER, TAIL, CHECKPOINT = 1, 2, 3, 4
MANIFEST, ENTRY, ACKNOWLEDGEMENT = 1, 2, 3
NO_NUMBER = 0xFFFFFFFF
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
HEAD, ROW, FRAME = "<4sHH16sIIQ", "<BBHIIIQ32s", "<4sHHQIIQ32s"


def crc32c(data: bytes) -> int:
    return int(lib.st_crc32c(0, ffi.from_buffer(data), len(data)))


# ---- manifests -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A line of a manifest; `parent` as it stands there: 0 is the root."""

    kind: int
    position: int
    parent: int
    size: int
    key: bytes
    crc: int = 0
    flags: int = 0

    def pack(self) -> bytes:
        return struct.pack(ROW, self.kind, self.flags, 0, self.position, self.parent, self.crc, self.size, self.key)


@dataclass
class Manifest:
    """What an image is made of."""

    identity: bytes
    ids: tuple[int, ...]
    entries: list[Entry] = field(default_factory=list)

    def pack(self) -> bytes:
        body = struct.pack(HEAD, b"SIMG", 1, 0, self.identity, len(self.ids), len(self.entries), 0)
        body += struct.pack(f"<{len(self.ids)}I", *self.ids) + b"".join(e.pack() for e in self.entries)
        return body + struct.pack("<I", crc32c(body))

    @classmethod
    def unpack(cls, data: bytes) -> Manifest:
        magic, version, zero, identity, n, e, zero2 = struct.unpack_from(HEAD, data)
        assert (magic, version, zero, zero2) == (b"SIMG", 1, 0, 0)
        assert len(data) == 40 + 4 * n + 56 * e + 4
        assert struct.unpack_from("<I", data, len(data) - 4) == (crc32c(data[:-4]),)
        entries = []
        for i in range(e):
            kind, flags, zero, position, parent, crc, size, key = struct.unpack_from(ROW, data, 40 + 4 * n + 56 * i)
            assert zero == 0
            entries.append(Entry(kind, position, parent, size, key, crc, flags))
        return cls(identity, struct.unpack_from(f"<{n}I", data, 40), entries)

    def key(self, position: int) -> bytes:
        """Of the prefix of that many tokens."""
        key = hashlib.blake2b(b"strata page root\0" + self.identity.hex().encode(), digest_size=32).digest()
        for at in range(0, position, PAGE):
            part = self.ids[at : min(at + PAGE, position)]
            key = hashlib.blake2b(key + struct.pack(f"<{len(part)}I", *part), digest_size=32).digest()
        return key

    def find(self, kind: int, position: int) -> int | None:
        """The number of an entry."""
        return next((i for i, e in enumerate(self.entries) if (e.kind, e.position) == (kind, position)), None)

    def check(self) -> None:
        """Everything that the format promises of a list."""
        seen = set()
        for i, e in enumerate(self.entries):
            assert (e.kind, e.position) not in seen
            seen.add((e.kind, e.position))
            assert 0 < e.position <= len(self.ids)
            hangs_on = e.position - PAGE if e.kind == MAIN else e.position // PAGE * PAGE
            assert 0 <= e.parent <= i
            if e.parent:
                parent = self.entries[e.parent - 1]
                assert (parent.kind, parent.position) == (MAIN, hangs_on)
            else:
                assert hangs_on == 0
            assert e.key == self.key(e.position)
            assert e.flags == 0 or e.kind == CHECKPOINT


@dataclass
class Image:
    """A manifest and the bytes of its entries by number, as far as they are there."""

    manifest: Manifest
    payloads: dict[int, bytes] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return len(self.manifest.ids)

    def by_key(self) -> dict[tuple[int, int, bytes], bytes]:
        """The entries as a store would have them."""
        entries = self.manifest.entries
        return {(entries[i].kind, entries[i].position, entries[i].key): data for i, data in self.payloads.items()}


# ---- frames ----------------------------------------------------------------------------------------------------


def frame(kind: int, x: int, number: int = NO_NUMBER, size: int = 0, magic: bytes = b"SFRM", version: int = 1) -> bytes:
    return struct.pack(FRAME, magic, version, kind, x, number, 0, size, bytes(32))


def memfd(data: bytes, seals: int = SEALS) -> int:
    """A descriptor as a frame carries it."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@dataclass(frozen=True)
class Received:
    """A frame that came, and what it carried."""

    kind: int
    x: int
    number: int
    payload: bytes


class Bulk:
    """The daemon's end. A thread takes frames and acknowledges them; `acknowledging` may be turned off."""

    def __init__(self) -> None:
        self.socket, self.engines = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.frames: queue.Queue[Received | None] = queue.Queue()
        self.acknowledging = True
        self.acknowledged: queue.Queue[tuple[int, int]] = queue.Queue()
        self._stop, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        """The engine has its end now."""
        self.engines.close()
        self._thread.start()

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self.socket, self._stop], [], [])
            if self._stop in ready:
                return
            try:
                data, fds, flags, _ = socket.recv_fds(self.socket, 65, 4)
            except ConnectionResetError:
                data = b""
            if not data:
                self.frames.put(None)
                return
            assert len(data) == 64 and not flags & socket.MSG_CTRUNC
            magic, version, kind, x, number, zero, size, zeros = struct.unpack(FRAME, data)
            assert (magic, version, zero, zeros) == (b"SFRM", 1, 0, bytes(32))
            if kind == ACKNOWLEDGEMENT:
                assert not fds and size == 0
                self.acknowledged.put((x, number))
                continue
            self.frames.put(Received(kind, x, number, self._payload(fds, size)))
            if self.acknowledging:
                self.acknowledge(x, number)

    @staticmethod
    def _payload(fds: list[int], size: int) -> bytes:
        (fd,) = fds
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        assert os.fstat(fd).st_size == size
        with open(fd, "rb") as f:
            f.seek(0)
            return f.read()

    def acknowledge(self, x: int, number: int) -> None:
        self.socket.sendall(frame(ACKNOWLEDGEMENT, x, number))

    def send(self, kind: int, x: int, number: int, data: bytes, *, seals: int = SEALS, size: int | None = None) -> None:
        """One payload."""
        fd = memfd(data, seals)
        try:
            socket.send_fds(self.socket, [frame(kind, x, number, len(data) if size is None else size)], [fd])
        finally:
            os.close(fd)

    def send_raw(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Any message; the descriptors stay open here."""
        if fds:
            socket.send_fds(self.socket, [data], list(fds))
        else:
            self.socket.sendall(data)

    def take(self, timeout: float = 30) -> Received:
        """The next payload."""
        got = self.frames.get(timeout=timeout * PATIENCE)
        assert got is not None, "the engine closed the bulk socket"
        return got

    def take_acknowledgement(self, timeout: float = 30) -> tuple[int, int]:
        return self.acknowledged.get(timeout=timeout * PATIENCE)

    def close(self) -> None:
        os.write(self._wake, b"x")
        if self._thread.is_alive():
            self._thread.join()
        self.socket.close()
        self.engines.close()
        os.close(self._wake)
        os.close(self._stop)


# ---- an engine with both ----------------------------------------------------------------------------------------


class TransferError(Exception):
    """An XERR line."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
        self.text = text


def bits(chosen: Iterable[int]) -> str:
    """As a WANT line has them."""
    out = bytearray()
    for i in chosen:
        out.extend(bytes(max(0, i // 8 + 1 - len(out))))
        out[i // 8] |= 1 << i % 8
    return out.hex() or "-"


def chosen(text: str) -> list[int]:
    data = b"" if text == "-" else bytes.fromhex(text)
    return [8 * i + k for i, byte in enumerate(data) for k in range(8) if byte >> k & 1]


class ImageSlots(Slots):
    """Slots of an engine that has a bulk socket."""

    def __init__(self, *args: str | float | Path, model: str | Path = MODEL, env: dict[str, str] | None = None) -> None:
        self.bulk = Bulk()
        fd = self.bulk.engines.fileno()
        self._numbers = itertools.count(1)
        try:
            super().__init__(*map(str, args), "--bulk-fd", str(fd), model=model, env=env, pass_fds=[fd])
        except BaseException:
            self.bulk.close()
            raise

    def __enter__(self) -> ImageSlots:
        self.bulk.start()
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        try:
            super().__exit__(kind, exc, tb)
        finally:
            self.bulk.close()

    def new_x(self) -> int:
        return next(self._numbers)

    def said(self, x: int, *words: str, timeout: float = 60) -> list[str]:
        """Take lines until one of these words is said of x; its words behind x. Raises TransferError for XERR."""
        while True:
            for i, (word, number, *rest) in enumerate(self.transfers):
                if int(number) != x:
                    continue
                del self.transfers[i]
                if word == "XERR" and "XERR" not in words:
                    raise TransferError(rest[0], " ".join(rest[1:]))
                assert word in words, f"{word} {rest} is said of {x}, not one of {words}"
                return rest
            self.take(timeout)

    # -- parking -------------------------------------------------------------------------------------------------

    def ask(self, slot: int) -> tuple[int, Manifest]:
        """PARK up to the manifest."""
        x = self.new_x()
        self.engine.send(f"PARK {x} {slot}")
        return x, self.manifest(x)

    def manifest(self, x: int) -> Manifest:
        """The manifest frame of a PARK; lines are taken meanwhile, since a refusal is one."""
        while self.bulk.frames.empty():
            if not self.engine.has_line(0.01):
                continue
            self.take()
            if any(word == "XERR" and int(number) == x for word, number, *_ in self.transfers):
                self.said(x)
        got = self.bulk.take()
        assert (got.kind, got.x, got.number) == (MANIFEST, x, NO_NUMBER)
        manifest = Manifest.unpack(got.payload)
        manifest.check()
        return manifest

    def receive(self, x: int, manifest: Manifest, wanted: Sequence[int]) -> Image:
        """WANT and what comes of it, up to PARKED."""
        image = Image(manifest)
        self.engine.send(f"WANT {x} {bits(wanted)}")
        for i in sorted(wanted):
            got = self.bulk.take()
            assert (got.kind, got.x, got.number) == (ENTRY, x, i)
            entry = manifest.entries[i]
            assert len(got.payload) == entry.size and crc32c(got.payload) == entry.crc
            image.payloads[i] = got.payload
        assert self.said(x, "PARKED") == [str(len(manifest.ids))]
        return image

    def park(self, slot: int) -> Image:
        """The whole image of what a slot holds."""
        x, manifest = self.ask(slot)
        return self.receive(x, manifest, range(len(manifest.entries)))

    # -- restoring -----------------------------------------------------------------------------------------------

    def offer(self, slot: int, image: Image, p: int) -> tuple[int, list[int]]:
        """RESTORE up to WANT: what the engine asks for."""
        x = self.new_x()
        self.engine.send(f"RESTORE {x} {slot} {p}")
        self.bulk.send(MANIFEST, x, NO_NUMBER, image.manifest.pack())
        return x, chosen(self.said(x, "WANT")[0])

    def supply(self, x: int, image: Image, wanted: Iterable[int]) -> None:
        for i in wanted:
            self.bulk.send(ENTRY, x, i, image.payloads[i])

    def restore(self, slot: int, image: Image, p: int | None = None) -> list[int]:
        """A whole RESTORE; the entries that were asked for."""
        p = image.n if p is None else p
        x, wanted = self.offer(slot, image, p)
        self.supply(x, image, wanted)
        assert self.said(x, "RESTORED") == [str(p)]
        return wanted
