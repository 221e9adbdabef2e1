"""Running stratactl as its users do: as a program."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

PROGRAM = (sys.executable, "-m", "stratactl")


def environment(**extra: str) -> dict[str, str]:
    """The surroundings of a plain user: no terminal, no settings of ours."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("STRATA_", "XDG_", "NO_COLOR"))}
    return {**kept, "TERM": "xterm", **extra}


def stratactl(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run to the end; `extra` are environment variables."""
    return subprocess.run(
        [*PROGRAM, *words], env=environment(**extra), capture_output=True, text=True, timeout=30, check=False
    )


@contextlib.contextmanager
def puppet(path: Path, *replies: bytes) -> Iterator[Path]:
    """A peer that answers the messages of one client with `replies` in turn, then hangs up."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=_answer, args=(listener, replies))
        thread.start()
        yield path
        thread.join()


def _answer(listener: socket.socket, replies: tuple[bytes, ...]) -> None:
    client, _ = listener.accept()
    with client, client.makefile("rb") as stream:
        for reply in replies:
            while (byte := stream.read(1)) not in (b"\0", b""):
                pass
            if not byte:
                return
            client.sendall(reply)
