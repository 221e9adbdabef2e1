"""The verbs of stratactl: one table that the parser, the help, the completion scripts and the manual are made from."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from stratactl import __version__, render
from stratactl.client import Client, Refused

TYPE_CHECKING = False  # spares the import of typing at run time
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from typing import Any

INTERFACE = "io.strata.Control"

DONE, FAILED, USAGE, NOT_RUNNING, DENIED, TIMED_OUT = range(6)
EXIT_CODES = (
    (DONE, "done"),
    (FAILED, "the daemon refused or failed"),
    (USAGE, "wrong usage"),
    (NOT_RUNNING, "no daemon is running there, or it cannot be reached"),
    (DENIED, "permission denied"),
    (TIMED_OUT, "no answer in time"),
)


class Verb:
    """One verb. `run` takes the parsed arguments and `connect`, prints data to stdout, and returns an exit code."""

    def __init__(
        self,
        name: str,
        summary: str,
        detail: str,
        examples: tuple[tuple[str, str], ...],
        options: Callable[[ArgumentParser], None],
        run: Callable[[Namespace, Callable[[], Client]], int],
    ) -> None:
        self.name = name
        self.summary = summary
        self.detail = detail
        self.examples = examples
        self.options = options
        self.run = run


def note(text: str) -> None:
    """A remark to the user; stdout carries data only."""
    print(f"stratactl: {render.clean(text)}", file=sys.stderr)


def _status_options(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the complete snapshot as JSON")
    parser.add_argument("--watch", action="store_true", help="go on printing, after every change, until interrupted")


def _status(args: Namespace, connect: Callable[[], Client]) -> int:
    client = connect()
    if not args.watch:
        reply = client.call(f"{INTERFACE}.Status")
        _warn_of_versions(reply)
        print(json.dumps(reply["status"], indent=2) if args.json else render.status(reply["status"]))
        return DONE
    show = _json_line if args.json else render.Screen().show
    warned = False
    for reply in client.stream(f"{INTERFACE}.Watch"):
        if not warned:
            _warn_of_versions(reply)
            warned = True
        show(reply["status"])
    note("the daemon is stopping")
    return DONE


def _json_line(snapshot: dict[str, Any]) -> None:
    print(json.dumps(snapshot, separators=(",", ":")), flush=True)


def _version_options(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _version(args: Namespace, connect: Callable[[], Client]) -> int:
    client = connect()
    reply = client.call(f"{INTERFACE}.Version")
    _warn_of_versions(reply)
    if args.json:
        print(json.dumps({"stratactl": __version__, "socket": client.path, "stratad": reply}, indent=2))
    else:
        print(render.versions(__version__, client.path, reply))
    return DONE


def _get_options(parser: ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="a setting; without any, all are listed")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print as JSON")
    shape.add_argument("--names", dest="names_only", action="store_true", help="print names only, one a line")


def _get(args: Namespace, connect: Callable[[], Client]) -> int:
    client = connect()
    if args.names:
        settings = client.call(f"{INTERFACE}.Get", names=args.names)["settings"]
    else:
        settings = client.call(f"{INTERFACE}.ListSettings")["settings"]
    if args.json:
        print(json.dumps(settings, indent=2))
    elif args.names_only:
        print("\n".join(setting["name"] for setting in settings))
    else:
        print(render.setting_blocks(settings) if args.names else render.setting_table(settings))
    return DONE


def _completion_options(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to print a script for")


def _completion(args: Namespace, _connect: Callable[[], Client]) -> int:
    from stratactl.completion import script

    print(script(args.shell), end="")
    return DONE


def _help_options(parser: ArgumentParser) -> None:
    parser.add_argument("verb", nargs="?", metavar="VERB", help="the verb to explain")


def _help(args: Namespace, _connect: Callable[[], Client]) -> int:
    from stratactl.parser import help_of

    text = help_of(args.verb)
    if text is None:
        note(f"there is no verb {args.verb!r}; stratactl help lists them")
        return USAGE
    print(text, end="")
    return DONE


def _warn_of_versions(reply: dict[str, Any]) -> None:
    if reply["version"] != __version__:
        note(f"stratactl is version {__version__}, the daemon is version {reply['version']}")


def explain_unknown_method(client: Client, err: Refused) -> str:
    """What to say when the daemon does not know a method: most likely the two versions differ."""
    try:
        daemon = client.call("org.varlink.service.GetInfo")["version"]
    except Exception:
        daemon = "unknown"
    return (
        f"the daemon does not know {err.parameters.get('method')}: it is version {daemon}, stratactl is {__version__}"
    )


VERBS = (
    Verb(
        "status",
        "show what runs",
        "Shows the state of the daemon and of its engine, the model, and what is being answered. Never waits for the\n"
        "engine, so it works while a model loads and when the engine is down.",
        (
            ("stratactl status", "the short form"),
            ("stratactl status --json | jq .state", "one field, for a script"),
            ("stratactl status --watch", "go on until Ctrl-C"),
        ),
        _status_options,
        _status,
    ),
    Verb(
        "version",
        "show the versions of stratactl, of the daemon and of the engine",
        "Shows all versions and the socket that was used.",
        (("stratactl version", "all versions"), ("stratactl version --json", "for a script")),
        _version_options,
        _version,
    ),
    Verb(
        "get",
        "show settings",
        "Lists every setting with its value and where the value comes from; with names, everything about these.",
        (
            ("stratactl get", "all settings"),
            ("stratactl get threads max_context", "two of them in full"),
            ("stratactl get --json queue_limit", "for a script"),
        ),
        _get_options,
        _get,
    ),
    Verb(
        "completion",
        "print a completion script for a shell",
        "Prints a script that completes verbs, options, and the names of settings (asked from the daemon).",
        (
            ('eval "$(stratactl completion bash)"', "this bash session"),
            ("stratactl completion fish > ~/.config/fish/completions/stratactl.fish", "fish, for good"),
            ("stratactl completion zsh > ~/.zfunc/_stratactl", "zsh, where ~/.zfunc is in fpath"),
        ),
        _completion_options,
        _completion,
    ),
    Verb(
        "help",
        "explain a verb",
        "Prints the help of a verb, or the list of verbs.",
        (("stratactl help get", "the same as stratactl get --help"),),
        _help_options,
        _help,
    ),
)
