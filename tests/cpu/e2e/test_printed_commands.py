"""The commands of the README, and of the first section of each document that has some, do what they say.

They run as they stand, in a fresh directory with what a checkout has. All ask one server. Those that start a
server get a free port. What a machine of the tests lacks is left out, by pattern and with the reason.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.e2e.program import ServerProgram, serving
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.printed import DOCUMENTS, README, commands, first_commands, prepare

LACKING = {
    r"^make serve$": "makes an environment; the server is the one that all commands share",
    r"^source ": "the environment of `make serve`",
    r"\bpip install\b": "needs a package index",
    r"^podman ": "needs a container engine",
    r"\bowner/name\b": "needs the Hugging Face hub",
    r"\bvllm serve\b": "needs vLLM and a GPU",
    r"meta-llama/Llama-3.1-8B-Instruct\"": "asks the server of vLLM",
    r"\bsteps\.jsonl\b|\bother-day\.jsonl\b": "needs steps that another engine wrote",
    r"--profile (profile\.json|FILE)\b": "needs the profile that was fitted to them",
    r"\bMODEL\b|\bMODEL-Q8_0": "needs a model that the reader chooses",
    r"benchmarks\.serve\.peers": "needs other servers, and half an hour",
    r"\bgpu-(kernels|pack|check)\b|\bOUT4\b": "needs a GPU",
    r"path/to/directory$": "needs a Hugging Face directory with weights",
    r"-00001-of-00003": "needs a file in several parts",
    r"^onbeat profile$": "keeps a profile, which later servers would take; test_profile_command.py has it",
}
SLOW = r"^onbeat (serve|bench|capacity|plan)\b|--(replicas|disaggregate) |-name agents"
ASKING = {
    "onbeat bench serve ": "onbeat bench serve --base-url {url} ",
    "python examples/": "OPENAI_BASE_URL={url}/v1 python examples/",
}
"""Commands that ask the server at port 8000 unless they are told of another."""

PRINTED = dict.fromkeys(
    shlex.join(shlex.split(command, comments=True))
    for path in DOCUMENTS
    for command in (commands if path == README else first_commands)(path.read_text())
)
LEFT_OUT = {
    command: found
    for command in PRINTED
    if (found := next(filter(lambda p: re.search(p, command), LACKING), None))
}


TRIED = [
    pytest.param(command, marks=[pytest.mark.slow] if re.search(SLOW, command) else [], id=command)
    for command in PRINTED
    if command not in LEFT_OUT
]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_gguf: Path) -> Path:
    prepare(tmp_path)
    write_tiny_directory(tmp_path / "path/to/directory")
    for name in ("model.gguf", "model-Q4_K_M.gguf"):
        (tmp_path / "path/to" / name).symlink_to(smollm2_gguf)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asking(command: str, url: str) -> str:
    """Return a command that asks the server of the tests."""
    for start, told in ASKING.items():
        if command.startswith(start):
            return told.format(url=url) + command.removeprefix(start)
    quiet = re.sub(r"^curl ", "curl --silent --show-error --fail-with-body ", command)
    return re.sub(r"(http://)?(localhost|127\.0\.0\.1):8000", url, quiet)


def test_every_pattern_leaves_something_out() -> None:
    assert set(LEFT_OUT.values()) == LACKING.keys()


@pytest.mark.parametrize("command", TRIED)
def test_a_printed_command_works(command: str, fresh: Path, smollm2_server: ServerProgram) -> None:
    if command.startswith("onbeat serve"):
        with serving(*shlex.split(command)[2:]):
            return
    if command.startswith("curl ") and not shutil.which("curl"):
        pytest.skip("curl is not here")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-c", asking(command, smollm2_server.url)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
