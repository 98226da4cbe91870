"""Hub ids against a hub of our own on this machine: HTTP servers that answer, refuse, or say nothing."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import constants

from onbeat.core.errors import ModelLoadError
from onbeat.hub.resolve import resolve_model
from tests.waiting import patience

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Refusals(BaseHTTPRequestHandler):
    """Answers as the hub does for models that one cannot have."""

    ANSWERS: ClassVar = {
        "/api/models/owner/gated": (403, "GatedRepo"),
        "/api/models/owner/absent": (404, "RepoNotFound"),
        "/api/models/owner/model/revision/nowhere": (404, "RevisionNotFound"),
    }

    def do_GET(self) -> None:
        status, code = self.ANSWERS.get(self.path.partition("?")[0], (500, "Unknown"))
        body = json.dumps({"error": code}).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusals) as server:
        thread = threading.Thread(
            target=server.serve_forever, args=(0.02,)
        )  # an end that waits no half second
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("owner/gated", None, "is gated: accept its terms"),
        ("owner/absent", None, "model 'owner/absent'"),
        ("owner/model", "nowhere", "revision 'nowhere'"),
    ],
)
def test_refusals_are_explained(name: str, revision: str | None, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        resolve_model(name, revision=revision)


def test_unreachable_hub_is_a_clear_error_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with patience() as taken, pytest.raises(ModelLoadError, match=r"hub .*reached"):
        resolve_model("owner/model")
    assert taken.seconds < 10


@pytest.mark.slow
def test_silent_hub_is_a_clear_error_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, never answers
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with patience() as taken, pytest.raises(ModelLoadError, match=r"hub .*reached"):
            resolve_model("owner/model")
        assert taken.seconds < 10


def test_offline_by_environment_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://192.0.2.1")  # never routed
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with patience() as taken, pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE"):
        resolve_model("owner/model")
    assert taken.seconds < 2


def test_a_look_into_the_cache_alone_says_how_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://192.0.2.1")
    with (
        patience() as taken,
        pytest.raises(ModelLoadError, match=r"`onbeat.*owner/model`") as caught,
    ):
        resolve_model("owner/model", offline=True)
    assert "offline mode" not in str(caught.value)  # the caller asked for it; nobody set a mode
    assert taken.seconds < 2


def write_snapshot(cache: Path, *names: str) -> Path:
    model = cache / "models--owner--model"
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(COMMIT)
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


def test_cache_comes_first(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://192.0.2.1")
    snapshot = write_snapshot(empty_cache, "config.json", "tokenizer.json", "model.safetensors")
    files = resolve_model("owner/model")
    assert (files.kind, files.path.resolve(), files.name) == ("hf", snapshot.resolve(), "owner/model")


def test_half_cached_model_counts_as_absent(empty_cache: Path) -> None:
    write_snapshot(empty_cache, "config.json", "tokenizer.json")
    with pytest.raises(ModelLoadError, match=r"'owner/model' .*cache"):
        resolve_model("owner/model", offline=True)
    assert resolve_model("owner/model", offline=True, needs_weights=False).kind == "hf"


def test_interrupted_download_counts_as_absent(empty_cache: Path) -> None:
    index, first, second = (f"model{name}" for name in (".safetensors.index.json", "-1-of-2", "-2-of-2"))
    snapshot = write_snapshot(empty_cache, "config.json", "tokenizer.json", f"{first}.safetensors")
    for _ in ("without its index", "with it"):
        with pytest.raises(ModelLoadError, match=r"'owner/model' .*cache"):
            resolve_model("owner/model", offline=True)
        names = {"a": f"{first}.safetensors", "b": f"{second}.safetensors"}
        (snapshot / index).write_text(json.dumps({"weight_map": names}))
    (snapshot / f"{second}.safetensors").write_text("{}")
    assert resolve_model("owner/model", offline=True).path.resolve() == snapshot.resolve()
