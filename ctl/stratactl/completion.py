"""Completion scripts for shells, made from the table of verbs. Names of settings are asked from the daemon."""

from __future__ import annotations

import argparse

from stratactl.verbs import VERBS

_COMMON = ("--socket", "--timeout", "--help")
_ASK = "stratactl --timeout 1 get --names 2>/dev/null"


def script(shell: str) -> str:
    """The script for `bash`, `zsh` or `fish`."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def _options() -> dict[str, list[str]]:
    """The long options of every verb."""
    found = {}
    for verb in VERBS:
        parser = argparse.ArgumentParser(add_help=False)
        verb.options(parser)
        names = [name for action in parser._actions for name in action.option_strings]
        found[verb.name] = [*names, *_COMMON]
    return found


def _words() -> dict[str, str]:
    """What each verb takes besides options, as a shell command substitution or as words."""
    return {
        "get": f"$({_ASK})",
        "help": " ".join(verb.name for verb in VERBS),
        "completion": "bash zsh fish",
    }


def _bash() -> str:
    cases = "\n".join(
        f'        {verb}) words="{" ".join(options)} {_words().get(verb, "")}" ;;'
        for verb, options in _options().items()
    )
    verbs = " ".join(verb.name for verb in VERBS)
    return f"""\
# bash completion for stratactl
_stratactl() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} verb="" words i
    if [[ $previous == --socket ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
        return
    fi
    [[ $previous == --timeout ]] && return
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
        --socket | --timeout) ((i++)) ;;
        -*) ;;
        *) verb=${{COMP_WORDS[i]}}; break ;;
        esac
    done
    case $verb in
        "") words="{verbs} --version {" ".join(_COMMON)}" ;;
{cases}
        *) words="" ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}}
complete -F _stratactl stratactl
"""


def _zsh() -> str:
    verbs = "\n".join(f"    '{verb.name}:{verb.summary}'" for verb in VERBS)
    cases = "\n".join(
        f"    {verb}) compadd -- {' '.join(options)} {_zsh_words(verb)} ;;" for verb, options in _options().items()
    )
    return f"""\
#compdef stratactl
# zsh completion for stratactl
_stratactl() {{
  local -a verbs
  verbs=(
{verbs}
  )
  local verb="" i
  case ${{words[CURRENT-1]}} in
    --socket) _files; return ;;
    --timeout) return ;;
  esac
  for ((i = 2; i < CURRENT; i++)); do
    case ${{words[i]}} in
      --socket|--timeout) ((i++)) ;;
      -*) ;;
      *) verb=${{words[i]}}; break ;;
    esac
  done
  case $verb in
    "") _describe verb verbs; compadd -- --version {" ".join(_COMMON)} ;;
{cases}
  esac
}}
if [[ ${{zsh_eval_context[-1]}} == loadautofunc ]]; then _stratactl "$@"; else compdef _stratactl stratactl; fi
"""


def _zsh_words(verb: str) -> str:
    return f'${{(f)"$({_ASK})"}}' if verb == "get" else _words().get(verb, "")


def _fish() -> str:
    lines = [
        "# fish completion for stratactl",
        "complete -c stratactl -f",
        "complete -c stratactl -l socket -r -F -d 'the control socket'",
        "complete -c stratactl -l timeout -x -d 'seconds to wait for an answer'",
        "complete -c stratactl -l help -d 'show help'",
        "complete -c stratactl -n __fish_use_subcommand -l version -d 'print the version of stratactl'",
    ]
    lines += [f"complete -c stratactl -n __fish_use_subcommand -a {verb.name} -d '{verb.summary}'" for verb in VERBS]
    for verb, options in _options().items():
        seen = f"-n '__fish_seen_subcommand_from {verb}'"
        lines += [f"complete -c stratactl {seen} -l {name[2:]}" for name in options if name not in _COMMON]
        if verb in _words():
            words = _words()[verb].replace("$(", "(")
            lines.append(f"complete -c stratactl {seen} -a '{words}'")
    return "\n".join(lines) + "\n"
