"""Keys, TLS and addresses, as flags of the real program."""

from __future__ import annotations

import json
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from onbeat.core.errors import ModelLoadError
from onbeat.hub.resolve import resolve_model
from tests.conftest import SMOLLM2
from tests.cpu.e2e.program import SMALL, ServerProgram, environment, serving

TINY = ("--load-format", "dummy", "--dtype", "float32", *SMALL)


def try_example(
    server: ServerProgram, *options: str, key: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command of the ready line in a shell."""
    command = " ".join((server.example(), "--silent", *options))
    env = environment(ONBEAT_API_KEY=key)
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=env, check=False)


def test_tls_keys_ipv6_and_several_names(tiny_directory: Path, tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:::1")
    keys = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    command = ("openssl", "req", "-x509", *keys, "-keyout", key, "-out", cert, "-days", "2", *subject)
    subprocess.run(command, check=True, capture_output=True)
    api_keys = tmp_path / "api-keys"
    api_keys.write_text("first-key\nsecond-key\n")
    tls = ("--ssl-keyfile", key, "--ssl-certfile", cert)
    names = ("--served-model-name", "it's mine", "--served-model-name", "other")
    access = (*tls, "--api-key-file", api_keys, "--host", "::1", *names)
    with serving(tiny_directory, *TINY, *access) as server:
        assert server.url.startswith("https://[::1]:")
        trust = f"--cacert {cert}"
        assert json.loads(try_example(server, trust, key="second-key").stdout)["model"] == "it's mine"
        refused = json.loads(try_example(server, trust, key="wrong-key").stdout)
        assert refused["error"]["code"] == "invalid_api_key"
        assert try_example(server, key="second-key").returncode == 60  # the certificate is not trusted
        trusting, headers = ssl.create_default_context(cafile=cert), {"authorization": "Bearer first-key"}
        with httpx.Client(base_url=server.url, verify=trusting, headers=headers) as client:
            models = client.get("/v1/models").json()["data"]
            assert [model["id"] for model in models] == ["it's mine", "other"]
            body = {"model": "other", "prompt": "x", "max_tokens": 1}
            assert client.post("/v1/completions", json=body).json()["model"] == "other"
        assert not any("-key" in line for line in server.lines if "INFO" in line)  # none is logged


@pytest.mark.slow
def test_without_a_model_the_embedded_one_is_served() -> None:
    try:
        resolve_model(SMOLLM2, offline=True)
    except ModelLoadError as error:
        pytest.skip(str(error))
    with serving(*SMALL) as server:
        assert server.lines[0].startswith(f"model {SMOLLM2}: ")
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == SMOLLM2
        assert try_example(server, "--fail").returncode == 0
