"""The command line of `stratad`, made from the settings table.

Exit codes: 0 ended as asked, 1 failed, 2 wrong usage, 78 the configuration (or the model it names) cannot be used.
Errors are one line on standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from stratad import config, logs
from stratad.launch import check_places
from stratad.settings import SETTINGS, Setting, SettingError, plain, suggest
from stratad.version import daemon_version

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_CONFIG = 0, 1, 2, 78

EPILOG = """\
Every setting may also stand in strata.toml under its name (max_context = 8192) and in the environment
(STRATA_MAX_CONTEXT=8192). The strongest wins: default, strata.toml, strata-<model>.json, override file,
environment, command line, change at run time. Without --config, /etc/strata/strata.toml is read if it exists.

signals:
  TERM, INT   stop: running answers get drain_limit_s; a second signal stops at once
  HUP         read the configuration again; with any error in it nothing changes

exit codes:
  0 stopped as asked   1 failed   2 wrong usage   78 the configuration or the model cannot be used
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, not the whole usage."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def build_parser() -> argparse.ArgumentParser:
    """The parser: a group of options for each group of settings, and what only the command line has."""
    parser = _Parser(
        prog="stratad",
        usage="stratad [--model FILE] [--listen HOST:PORT] [--config FILE] [option ...]",
        description="Serve a language model over HTTP: the daemon that keeps strata-engine running.",
        epilog=EPILOG,
        formatter_class=_Formatter,
        allow_abbrev=False,
        add_help=False,
    )
    general = parser.add_argument_group("General")
    general.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        type=Path,
        help="strata.toml, or a strata-<model>.json; may be repeated",
    )
    general.add_argument(
        "--check-config", action="store_true", help="say what is wrong with the configuration and exit"
    )
    general.add_argument(
        "--verbose",
        "-v",
        action="store_true",
        help="with --check-config: every setting in force and where it comes from",
    )
    general.add_argument("--version", action="version", version=f"stratad {daemon_version()}", help="show the version")
    general.add_argument("--help", "-h", action="help", help="show this help")  # fmt: skip
    groups: dict[str, argparse._ArgumentGroup] = {}
    for row in SETTINGS:
        if row.group not in groups:
            groups[row.group] = parser.add_argument_group(row.group)
        _add_option(groups[row.group], row)
    return parser


def _add_option(group: argparse._ArgumentGroup, row: Setting) -> None:
    if row.kind == "bool":
        group.add_argument(row.flag, dest=row.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS,
                           help=_help(row))  # fmt: skip
        return
    metavar = row.metavar or ("{" + ",".join(row.choices) + "}" if row.choices else row.kind.upper())
    action = "append" if row.kind == "list" else "store"
    group.add_argument(
        row.flag, dest=row.name, action=action, default=argparse.SUPPRESS, metavar=metavar, help=_help(row)
    )


def _help(row: Setting) -> str:
    facts = []
    if row.unit:
        facts.append(row.unit)
    if row.kind in ("int", "float"):
        facts.append(row.range)
    default = plain(row.default)
    if default not in (None, "", [], {}):
        facts.append(f"default {_plain_text(default)}")
    text = row.help + (f" ({'; '.join(facts)})" if facts else "")
    return text.replace("%", "%%")


def _plain_text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed command line. Exits with 2, and a suggestion, for what is not an option."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    arguments.fail = parser.error
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        word = unknown[0].partition("=")[0]
        noun = "option" if word.startswith("-") else "argument"
        parser.error(f"unknown {noun} {word}{suggest(word, known)}")
    return arguments


def inputs_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> config.Inputs:
    """What the configuration is read from. Exits with 2 for a value that its option cannot take."""
    options: dict[str, str | bool] = {}
    for row in SETTINGS:
        value = getattr(arguments, row.name, None)
        if isinstance(value, list):
            value = (" " if row.shell_words else ",").join(value)
        if isinstance(value, str):
            try:
                row.parse(value)
            except SettingError as error:
                arguments.fail(f"{row.flag} {error.message}")
        if value is not None:
            options[row.name] = value
    return config.Inputs(files=tuple(arguments.config), options=options, environ=environ)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `stratad`. Returns the exit code."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    inputs = inputs_of(arguments, dict(os.environ))
    try:
        loaded = config.load(inputs)
        problems = check_places(loaded.settings)
        if problems:
            raise config.ConfigError(problems)
    except config.ConfigError as error:
        return _say_problems(error, every=arguments.check_config)
    if arguments.check_config:
        return _say_ok(loaded, arguments.verbose)
    return _run(inputs, loaded)


def _say_problems(error: config.ConfigError, every: bool) -> int:
    lines = [str(problem) for problem in error.problems] if every else [error.one_line()]
    for line in lines:
        print(f"stratad: configuration: {line}", file=sys.stderr)
    return EXIT_CONFIG


def _say_ok(loaded: config.Loaded, verbose: bool) -> int:
    for note in loaded.notes:
        print(f"stratad: note: {note}", file=sys.stderr)
    if verbose:
        for row in loaded.settings.describe():
            origin = f" {row['origin']}" if row["origin"] else ""
            print(f"{row['name']} = {_toml(row['value'])}  # {row['source']}{origin}")
    print("configuration ok")
    return EXIT_OK


def _toml(value: object) -> str:
    """A value as strata.toml has it, as far as our settings go."""
    if value is None:
        return "(unset)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def _run(inputs: config.Inputs, loaded: config.Loaded) -> int:
    from stratad.app import Daemon  # imports much: --help and --check-config need none of it
    from stratad.errors import StrataError
    from stratad.http.app import open_http
    from stratad.lock import LockError

    logs.set_up(loaded.settings.text("log_level"), inputs.environ)
    for note in loaded.notes:
        logging.getLogger("stratad.config").warning("%s", note)

    async def serve() -> int:
        return await Daemon(inputs, loaded, open_http=open_http).run()

    try:
        return asyncio.run(serve())
    except config.ConfigError as error:
        return _say_problems(error, every=False)
    except (LockError, StrataError) as error:
        print(f"stratad: {error}", file=sys.stderr)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"stratad: {place}{error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stratad: interrupted", file=sys.stderr)
    except Exception as error:
        logging.getLogger("stratad").debug("internal error", exc_info=error)
        text = f"{type(error).__name__}: {error}"
        print(f"stratad: internal error: {text} (--log-level debug shows more)", file=sys.stderr)
    return EXIT_FAILED
