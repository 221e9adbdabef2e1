"""stratactl(1) says what the program does."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratactl.verbs import EXIT_CODES, VERBS

PAGE = (Path(__file__).parents[2] / "man" / "stratactl.1").read_text(encoding="utf-8")


def test_every_verb_and_option_is_there() -> None:
    for verb in VERBS:
        assert f".It Ic {verb.name}" in PAGE
        parser = argparse.ArgumentParser(add_help=False)
        verb.options(parser)
        for action in parser._actions:
            for option in action.option_strings:
                assert option.replace("--", "\\-") in PAGE
            for choice in action.choices or ():
                assert choice in PAGE


def test_every_exit_code_is_there() -> None:
    for code, meaning in EXIT_CODES:
        assert f".It {code}\n{meaning}\n" in PAGE
