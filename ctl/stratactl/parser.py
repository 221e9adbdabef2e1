"""The argument parser, made from the table of verbs."""

from __future__ import annotations

import argparse

from stratactl import __version__
from stratactl.verbs import EXIT_CODES, VERBS, Verb

TIMEOUT_S = 10.0
_DESCRIPTION = "Look at a running Strata daemon through its control socket."


def build() -> argparse.ArgumentParser:
    """The parser for the whole command line. Verbs take the common options too."""
    parser = argparse.ArgumentParser(
        prog="stratactl",
        description=_DESCRIPTION,
        epilog=_exit_codes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"stratactl {__version__}", help="print only ours")
    _common(parser, None, TIMEOUT_S)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    for verb in VERBS:
        _common(_add(verbs, verb), argparse.SUPPRESS, argparse.SUPPRESS)
    return parser


def help_of(name: str | None) -> str | None:
    """The help text of a verb (None: of the program), or None for an unknown verb."""
    parser = build()
    if name is None:
        return parser.format_help()
    verbs = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    found: argparse.ArgumentParser | None = verbs.choices.get(name)
    return found.format_help() if found is not None else None


def _add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], verb: Verb) -> argparse.ArgumentParser:
    width = max(len(command) for command, _ in verb.examples)
    examples = "\n".join(f"  {command:<{width}}  # {meaning}" for command, meaning in verb.examples)
    parser = verbs.add_parser(
        verb.name,
        help=verb.summary,
        description=verb.detail,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.options(parser)
    parser.set_defaults(run=verb.run)
    return parser


def _common(parser: argparse.ArgumentParser, socket_default: str | None, timeout_default: float | str) -> None:
    parser.add_argument(
        "--socket", metavar="SOCKET", default=socket_default, help="the daemon's control socket (else STRATA_SOCKET)"
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=timeout_default,
        help=f"give up when no answer comes for this long (default {TIMEOUT_S:g})",
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.001 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"must be 0.001 to 86400 seconds, not {text}")
    return seconds


def _exit_codes() -> str:
    return "exit codes:\n" + "\n".join(f"  {code}  {meaning}" for code, meaning in EXIT_CODES)
