"""A pytest plugin: vLLM's tests find an onbeat server where they start theirs, and nothing of vLLM's Python.

Assertions stay as they are. Tests that call vLLM's own classes are skipped: they test no server.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import httpx
import openai
import pytest
from _pytest.outcomes import Skipped

import onbeat
from benchmarks.check.vllm_api.serve import accepted, stand_in
from benchmarks.harness.servers import free_port
from onbeat.hub.resolve import resolve_model

_START_SECONDS = 600
_SERVER_FIXTURES = ("server", "client", "remote", "url")


FOREIGN = ("vllm", *(() if importlib.util.find_spec("PIL") else ("PIL",)))


class Foreign:
    """Something of vLLM's Python; whoever calls it is skipped."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Foreign:
        if name.startswith("__"):
            raise AttributeError(name)
        return Foreign(f"{self.name}.{name}")

    def __call__(self, *_: object, **__: object) -> Any:
        if "PYTEST_CURRENT_TEST" not in os.environ:  # while a file is read
            return self
        pytest.skip(f"tests vLLM's own Python ({self.name}), no server")

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()

    __add__ = __radd__ = __or__ = __ror__ = __call__


class Shown:
    """An answer's JSON, whose fields are attributes: what tests read vLLM's models of answers for."""

    @classmethod
    def model_validate(cls, value: Any) -> Any:
        """Return JSON with its objects as these."""
        if isinstance(value, list):
            return list(map(cls.model_validate, value))
        if not isinstance(value, dict):
            return value
        shown = cls()
        shown.__dict__ = {name: cls.model_validate(each) for name, each in value.items()}
        return shown


class ForeignModule(ModuleType):
    """A module of vLLM's, with what a test of a server needs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if name in GIVEN:
            return GIVEN[name]
        if name.endswith("Response"):
            return Shown
        return type(name, (Exception,), {}) if name.endswith("Error") else Foreign(full)


class ForeignFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of vLLM's, and what its tests share that needs these."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in FOREIGN or name in ("tests.utils", "tests.conftest"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ForeignModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


@cache
def _tokenizer(known_model: str) -> Any:
    from transformers import AutoTokenizer

    path = resolve_model(known_model).path
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def get_tokenizer(tokenizer_name: str, *_: object, **__: object) -> Any:
    """Return transformers' tokenizer of the model that is served in place of another."""
    return _tokenizer(stand_in(tokenizer_name))


class ModelConfig:
    """The size of the vocabulary, which is all that tests ask it for."""

    def __init__(self, model: str, *_: object, **__: object) -> None:
        self._model = model

    def get_vocab_size(self) -> int:
        """Return that of the model that is served in its place."""
        from transformers import AutoConfig

        path = resolve_model(stand_in(self._model)).path
        return int(AutoConfig.from_pretrained(path.parent, gguf_file=path.name).vocab_size)


class Hub:
    """Where tests fetch adapters of other models: they get a name of none."""

    def snapshot_download(self, repo_id: str, **_: object) -> str:
        """Return a path at which nothing is."""
        return f"/nowhere/{repo_id}"


class RemoteOpenAIServer:
    """An onbeat server with the interface of vLLM's class of this name.

    It goes on for the next file that asks for the same model and arguments, unless tests end it.
    """

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False
    running: RemoteOpenAIServer | None = None
    left_out: ClassVar[dict[str, list[str]]] = {}
    """By test file: flags of its latest server that onbeat does not take."""
    port: int
    proc: subprocess.Popen[bytes]

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: dict[str, str] | None = None,
        **_: object,
    ) -> None:
        self.key = (model, tuple(vllm_serve_args))
        self.host = "127.0.0.1"
        # A test that speaks through a Unix socket, which onbeat does not make, must not reach the port.
        place = vllm_serve_args.index("--uds") + 1 if "--uds" in vllm_serve_args else 0
        self.uds = vllm_serve_args[place] if place else None
        flags = [flag for flag in accepted(vllm_serve_args)[1] if flag != "--tokenizer"]
        self.left_out[_test_file(os.environ.get("PYTEST_CURRENT_TEST", ""))] = flags
        before = RemoteOpenAIServer.running
        if before is not None and before.key == self.key and before.proc.poll() is None:
            self.port, self.proc = before.port, before.proc
        else:
            if before is not None:
                before.stop()
            self._start(model, list(vllm_serve_args), env_dict or {})
        RemoteOpenAIServer.running = self

    def _start(self, model: str, arguments: list[str], env: dict[str, str]) -> None:
        if "--port" in arguments:
            self.port = int(arguments[arguments.index("--port") + 1])
        else:
            self.port = free_port()
            arguments += ["--port", str(self.port)]
        command = [sys.executable, "-m", "benchmarks.check.vllm_api.serve", model, *arguments]
        self.proc = subprocess.Popen(command, env={**os.environ, **env}, start_new_session=True)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self.proc.poll() is not None:
                raise RuntimeError("Server exited unexpectedly.")
            try:
                if httpx.get(self.url_for("ready")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        self.stop()
        raise RuntimeError("Server failed to start in time.")

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        if "tiny-random" in self.key[0]:  # the tests of shutting down end it
            self.stop()

    def stop(self) -> None:
        """End the server."""
        self.proc.terminate()
        try:
            self.proc.wait(60)
        except subprocess.TimeoutExpired:
            self.proc.kill()

    def _get_process_termination_timeout(self) -> float:
        return 60.0

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """Return the address of a path."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        """Return OpenAI's client."""
        options = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, **options}
        return openai.OpenAI(**options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Return OpenAI's client."""
        options = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, **options}
        return openai.AsyncOpenAI(**options)

    def get_client_anthropic(self, **options: Any) -> Any:
        """Return Anthropic's client."""
        import anthropic

        return anthropic.Anthropic(
            base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options
        )

    def get_async_client_anthropic(self, **options: Any) -> Any:
        """Return Anthropic's client."""
        import anthropic

        return anthropic.AsyncAnthropic(
            base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options
        )


_environment = Foreign("vllm.envs")
_environment.VLLM_USE_RUST_FRONTEND = False  # type: ignore[attr-defined]
GIVEN: dict[str, Any] = {
    "RemoteOpenAIServer": RemoteOpenAIServer,
    "get_tokenizer": get_tokenizer,
    "ModelConfig": ModelConfig,
    "get_open_port": free_port,
    "hf_api": Hub,
    "VERSION": onbeat.__version__,
    "envs": _environment,
    "POOLING_TASKS": (),
}


def note(test: str, outcome: str, reason: str) -> None:
    """Take down what became of a test, and which flags of its server were left out."""
    left_out = " ".join(dict.fromkeys(RemoteOpenAIServer.left_out.get(_test_file(test), ())))
    result = {"test": test, "outcome": outcome, "reason": reason, "left_out": left_out}
    with Path(os.environ["VLLM_API_RESULTS"]).open("a") as results:
        results.write(json.dumps(result) + "\n")


def _test_file(test: str) -> str:
    return test.split("::")[0]


_version = ForeignModule("vllm.version")
_version.__version__ = onbeat.__version__  # type: ignore[attr-defined]
_version._prev_minor_version = lambda: "0.31"  # type: ignore[attr-defined]
sys.modules["vllm.version"] = GIVEN["version"] = _version
sys.meta_path.insert(0, ForeignFinder())  # before pytest reads any conftest


@pytest.fixture
def local_asset_server() -> None:
    """Serve no pictures: no test of a text model opens one."""


def pytest_configure() -> None:
    """Have transformers read a stand-in's tokenizer where one is asked for by its hub id."""
    import transformers

    auto: Any = transformers.AutoTokenizer
    read = auto.from_pretrained

    def from_pretrained(name: Any, *arguments: Any, **options: Any) -> Any:
        return read(name, *arguments, **options) if Path(name).exists() else get_tokenizer(name)

    auto.from_pretrained = from_pretrained


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that use no server."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        asks = any(part in name for name in names for part in _SERVER_FIXTURES)
        function = getattr(item, "function", None)
        if not asks and (function is None or "RemoteOpenAIServer" not in inspect.getsource(function)):
            item.add_marker(pytest.mark.skip(reason="tests vLLM's own Python, no server"))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Take down a file that cannot be read."""
    if report.failed:
        reason = " ".join(str(report.longrepr).split())[-300:]
        note(report.nodeid, "failed", reason)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    """Take down what became of a test, and why."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or (report.when == "setup" and not report.passed):
        reason = ""
        if call.excinfo is not None:
            raised = call.excinfo.value
            error = raised.msg if isinstance(raised, Skipped) else call.excinfo.exconly()
            reason = " ".join(str(error).split())[:400]
        note(item.nodeid, report.outcome, reason)


def pytest_sessionfinish() -> None:
    """End the last server."""
    if RemoteOpenAIServer.running is not None:
        RemoteOpenAIServer.running.stop()
