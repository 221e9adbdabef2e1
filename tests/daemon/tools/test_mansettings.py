"""The manual pages: settings as the table has them, and nothing that a formatter complains about."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stratad.metrics import METRICS
from stratad.settings import SETTINGS
from stratad.tools.mansettings import main, updated

MANUALS = Path(__file__).parents[3] / "man"
WITH_SETTINGS = [MANUALS / "strata.toml.5", MANUALS / "stratad.8"]
ENGINE = Path(sys.executable).parent / "strata-engine"
PAGES = [*WITH_SETTINGS, MANUALS / "stratactl.1", MANUALS / "strata-engine.8"]


def test_the_pages_are_up_to_date() -> None:
    assert main(["--check", *map(str, WITH_SETTINGS)]) == 0, "run python -m stratad.tools.mansettings man/*.[58]"


def test_every_setting_stands_in_the_pages() -> None:
    toml, daemon = (page.read_text(encoding="utf-8") for page in WITH_SETTINGS)
    for row in SETTINGS:
        assert f".It Ic {row.name}\n" in toml
        assert f".It Fl {row.flag[1:]}".replace("-", "\\-") in daemon


def test_every_metric_stands_in_the_page() -> None:
    page = (MANUALS / "stratad.8").read_text(encoding="utf-8")
    assert all(f".It Li {metric.full_name}" in page for metric in METRICS)


def test_a_stale_page_is_found_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.5"
    text = 'before\n.\\" BEGIN settings as keys\nold\n.\\" END settings\nafter\n'
    page.write_text(text)
    assert main(["--check", str(page)]) == 1
    assert str(page) in capsys.readouterr().err and page.read_text() == text
    assert main([str(page)]) == 0 and main(["--check", str(page)]) == 0
    mended = page.read_text()
    assert mended.startswith("before\n") and mended.endswith("after\n") and "\nold\n" not in mended
    assert updated(mended) == mended


def test_an_unknown_style_is_an_error() -> None:
    with pytest.raises(ValueError, match="must be one of settings as keys, settings as options, metrics as list"):
        updated('.\\" BEGIN settings as poems\n.\\" END settings\n')


@pytest.mark.skipif(not ENGINE.exists(), reason="the engine is not built")
def test_every_option_of_the_engine_stands_in_its_page() -> None:
    shown = subprocess.run([ENGINE, "--help"], capture_output=True, text=True, check=True).stdout
    options = re.findall(r"^  --([a-z-]+)", shown, re.MULTILINE)
    documented = re.findall(r"^\.It Fl (\S+)", (MANUALS / "strata-engine.8").read_text(encoding="utf-8"), re.MULTILINE)
    assert [option.replace("\\-", "-") for option in documented] == [f"-{option}" for option in options] != []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_has_no_complaint(page: Path) -> None:
    done = subprocess.run(["groff", "-ww", "-mdoc", "-Tutf8", "-z", str(page)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_mandoc_has_no_complaint(page: Path) -> None:
    done = subprocess.run(["mandoc", "-T", "lint", str(page)], capture_output=True, text=True)
    complaints = [line for line in done.stdout.splitlines() if "referenced manual not found" not in line]
    assert complaints == []
