"""`make bench-peer`: build llama.cpp's programs for this machine from a released source package, into build/peer.

The source comes with the package llama-cpp-python from the Python package index; nothing else is fetched. Building
takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench.machine import EMBEDDED, ROOT
from tests.bench.peer import PROGRAMS

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
PLACE = ROOT / "build" / "peer"
INSIDE = "vendor/llama.cpp"
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",  # for this processor, as Strata chooses its kernels
    "LLAMA_CURL": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # would be downloaded
    "LLAMA_BUILD_COMMIT": f"{PACKAGE}-{VERSION}",
}


NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
"""Some virtual machines name AMX and then fault at its instructions: built for it, the peer ends at once."""


def download(place: Path) -> Path:
    """The source package in `place`, fetched unless it is there."""
    found = sorted(place.glob(f"{PACKAGE.replace('-', '_')}-{VERSION}.tar.gz"))
    if found:
        return found[0]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    options = ["--no-binary", PACKAGE, "--no-build-isolation", "--dest", str(place)]
    run([*pip, *options, f"{PACKAGE}=={VERSION}"])
    return download(place)


def unpack_command(package: Path, source: Path) -> list[str]:
    """Unpack llama.cpp without the package around it, and without its `.git`, a link to nowhere."""
    inside = f"{package.name.removesuffix('.tar.gz')}/{INSIDE}"
    where = ["-C", str(source), f"--strip-components={inside.count('/') + 1}", f"--exclude={inside}/.git"]
    return ["tar", "-xzf", str(package), *where, inside]


def configure_command(source: Path, build: Path, flags: str = "") -> list[str]:
    """The cmake call; `flags` are for the compilers."""
    options = {**OPTIONS, "CMAKE_C_FLAGS": flags, "CMAKE_CXX_FLAGS": flags}
    return ["cmake", "-S", str(source), "-B", str(build), *(f"-D{name}={value}" for name, value in options.items())]


def build_command(build: Path, jobs: int) -> list[str]:
    """The build of the programs that the bench runs."""
    return ["cmake", "--build", str(build), "-j", str(jobs), "--target", *PROGRAMS]


def run(command: Sequence[str]) -> None:
    """Run one step and end with its status if it fails."""
    print("+", " ".join(command), flush=True)
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(status)


def faults(build: Path) -> bool:
    """Whether what was built for this processor dies of one of its instructions."""
    command = [str(build / "bin" / "llama-bench"), "-m", str(EMBEDDED), "-p", "64", "-n", "2", "-r", "1"]
    return subprocess.run(command, capture_output=True, check=False).returncode in (-signal.SIGILL, -signal.SIGSEGV)


def main(arguments: Sequence[str] | None = None) -> int:
    """All steps; those already done are skipped."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.build_peer", description=__doc__)
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compilers at once")
    args = options.parse_args(arguments)
    source = PLACE / "source"
    PLACE.mkdir(parents=True, exist_ok=True)
    if not (source / "CMakeLists.txt").exists():
        package = download(PLACE)
        source.mkdir(exist_ok=True)
        run(unpack_command(package, source))
    run(configure_command(source, PLACE))
    run(build_command(PLACE, args.jobs))
    if faults(PLACE):
        print("it ends with a fault here; building it again without AMX", flush=True)
        run(configure_command(source, PLACE, NO_AMX))
        run(build_command(PLACE, args.jobs))
    print(f"The peer is ready in {PLACE / 'bin'}; `make bench` finds it there.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
