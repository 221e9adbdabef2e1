"""`stratactl`: parse, run the verb, and turn every failure into one line on stderr and an exit code."""

from __future__ import annotations

import os
import signal
import sys

from stratactl import __version__
from stratactl.client import Client, ClientError, Denied, NotRunning, Refused, TimedOut, path_fault
from stratactl.parser import build
from stratactl.places import candidates
from stratactl.verbs import DENIED, FAILED, INTERFACE, NOT_RUNNING, TIMED_OUT, USAGE, explain_unknown_method, note

TYPE_CHECKING = False  # spares the import of typing at run time
if TYPE_CHECKING:
    from argparse import Namespace

_CODES: dict[type[ClientError], int] = {NotRunning: NOT_RUNNING, Denied: DENIED, TimedOut: TIMED_OUT}
_REFUSALS = {
    f"{INTERFACE}.PermissionDenied": DENIED,
    "org.varlink.service.PermissionDenied": DENIED,
}


class _Session:
    """Connects when a verb first needs the daemon, to the first candidate that answers."""

    def __init__(self, args: Namespace) -> None:
        named = args.socket or os.environ.get("STRATA_SOCKET")
        self._paths = [named] if named else candidates(os.environ)
        self._timeout_s: float = args.timeout
        self.client: Client | None = None

    def fault(self) -> str | None:
        """What is wrong with the path that was named, if anything."""
        return path_fault(self._paths[0]) if len(self._paths) == 1 else None

    def connect(self) -> Client:
        """The connection. Raises the most telling failure: a socket that exists but is closed to us says most."""
        failures: list[ClientError] = []
        for path in self._paths:
            try:
                self.client = Client(path, self._timeout_s)
                return self.client
            except NotRunning as err:
                failures.append(err)
            except ClientError as err:
                failures.insert(0, err)
                break
        if isinstance(failures[0], NotRunning):
            raise NotRunning("no daemon is running: " + "; ".join(str(err) for err in failures))
        raise failures[0]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    # Closed output and Ctrl-C end the program the way they end any other: at once and without a word.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    args = build().parse_args(argv)
    session = _Session(args)
    fault = session.fault()
    if fault is not None:
        note(fault)
        return USAGE
    try:
        code: int = args.run(args, session.connect)
        sys.stdout.flush()
        return code
    except Refused as err:
        note(_refusal(session, err))
        return _REFUSALS.get(err.name, FAILED)
    except ClientError as err:
        note(str(err))
        return _CODES.get(type(err), FAILED)
    except KeyError as err:
        note(f"the daemon's answer lacks {err}; its version may differ too much from {__version__}")
        return FAILED
    except OSError as err:  # stdout is full or broken
        note(f"cannot write: {err.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains once more
        return FAILED


def _refusal(session: _Session, err: Refused) -> str:
    if err.name == "org.varlink.service.MethodNotFound" and session.client is not None:
        return explain_unknown_method(session.client, err)
    if err.name == f"{INTERFACE}.TooManyConnections":
        return f"the daemon serves {err.parameters.get('limit')} connections already; try again"
    if err.name == f"{INTERFACE}.PermissionDenied":
        return f"permission denied: {err.parameters.get('method')} needs {err.parameters.get('needs')}"
    return str(err)


if __name__ == "__main__":
    sys.exit(main())
