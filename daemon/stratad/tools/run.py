"""`make run`: start stratad from a checkout, ask it one question over HTTP, and show how to go on.

Everything it makes lies in `.run/` of the checkout. Arguments go to stratad as they are, but for `--model NAME` where
NAME is a small real model that can be fetched (stratad.tools.fetch).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from stratad.tools.fetch import MODELS, FetchError, resolve

QUESTION = "What is the capital of France?"
POLL_S = 0.1


def base_url(listen: str) -> str:
    """The address to connect to for a listen address; a wildcard is reached by loopback."""
    host, _, port = listen.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}.get(host, host)
    return f"http://{host}:{port}"


def wait_ready(url: str, daemon: subprocess.Popen[bytes]) -> bool:
    """Follow the loading until requests are served; False when the daemon has ended."""
    shown = ""
    while daemon.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
        except urllib.error.HTTPError as error:
            detail = json.loads(error.read() or b"{}")
            text = str(detail.get("error", {}).get("message") or detail.get("status") or "")
            if text and text != shown:
                print(text, flush=True)
                shown = text
        except (OSError, ValueError):
            pass
        time.sleep(POLL_S)
    return False


def ask(url: str, question: str) -> None:
    """Send one chat request and print the answer token by token."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    print(f"\n> {question}\n", end="", flush=True)
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
    print("\n", flush=True)


def show_next_steps(url: str) -> None:
    """The lines a newcomer types next."""
    question = {"role": "user", "content": "My name is Zara. What is 12 plus 30?"}
    body = json.dumps({"messages": [question], "stream": True})
    print(f"Strata is serving at {url}. From another terminal:\n")
    print(f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'\n")
    print("  .venv/bin/stratactl status\n")
    print("Ctrl-C stops it.", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run stratad until it ends; returns its exit status."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    question = QUESTION
    if "--model" in args[:-1]:
        at = args.index("--model") + 1
        question = MODELS[args[at]].question if args[at] in MODELS else QUESTION
        try:
            args[at] = resolve(args[at])
        except FetchError as error:
            print(f"make run: {error}", file=sys.stderr)
            return 1
    listen = args[args.index("--listen") + 1] if "--listen" in args[:-1] else "127.0.0.1:8080"
    place = Path(".run")
    place.mkdir(mode=0o700, exist_ok=True)
    command = [str(Path(sys.executable).with_name("stratad")), *args]
    command += ["--control", str(place / "control.sock"), "--state", str(place / "state")]
    daemon = subprocess.Popen(command)
    url = base_url(listen)
    try:
        if wait_ready(url, daemon):
            ask(url, question)
            show_next_steps(url)
    except (OSError, ValueError, KeyError) as error:
        print(f"the first question failed: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        pass
    while True:  # Ctrl-C reaches stratad itself, which drains and stops; wait for that
        try:
            return daemon.wait()
        except KeyboardInterrupt:
            continue


if __name__ == "__main__":
    sys.exit(main())
