"""Run vLLM's tests of its HTTP API against onbeat, and say for each that fails why.

Fetches the source distribution of vLLM into a cache folder (pip downloads and unpacks it; nothing is built
or installed), and runs the tests below with their assertions. Their server is an onbeat server of another
model: the embedded one for small models, Gemma 3 270M for base models (`onbeat models fetch gemma3-270m`),
and for all others what `--chat-model` names. The tests import more than onbeat:
`pip install -e '.[serve,dev,clients]' anthropic psutil pybase64`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.check.vllm_api.serve import CHAT_MODEL

VERSION = "0.32.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "onbeat" / "vllm-tests"
FILES = (
    *(
        f"openai/chat_completion/test_{name}.py"
        for name in (
            *("chat", "chat_completion", "chat_echo", "chat_logit_bias_validation"),
            *("extra_content_fields", "logprob_token_ids"),
        )
    ),
    *(
        f"openai/completion/test_{name}.py"
        for name in ("completion", "prompt_validation", "token_in_token_out")
    ),
    *("openai/test_return_token_ids.py", "openai/test_chunked_prompt.py", "openai/models/test_models.py"),
    *("serve/tokenize/test_tokenization.py", "serve/middleware/test_optional_middleware.py"),
    *(f"serve/instrumentator/test_{name}.py" for name in ("basic", "metrics", "orca_metrics", "uds")),
    *("openai/responses/test_simple.py", "anthropic/test_messages.py", "launchers/test_shutdown.py"),
)
"""Below `tests/entrypoints`: those that start a server of a text model and need no GPU of their own."""

ASIDE = (
    *("serve/middleware/test_cors_middleware.py", "serve/middleware/test_authentication_middleware.py"),
    *("serve/exception_handling/test_error_sanitization.py", "serve/utils/test_sse_keep_alive.py"),
    *("serve/exception_handling/test_http_status_metrics.py", "anthropic/test_protocol_exports.py"),
    *("pooling/embed/test_online.py", "pooling/embed/test_online_dimensions.py"),
    *("pooling/scoring/test_bi_encoder_online.py", "tool_parsers/test_hermes_tool_parser.py"),
    *(
        f"openai/{name}.py"
        for name in (
            *("test_stop_token_ids", "test_return_tokens_as_ids", "test_session_id"),
            *("completion/test_completion_text_offset", "responses/test_basic", "responses/test_errors"),
            *("responses/test_structured_output", "chat_completion/test_root_path"),
            *("chat_completion/test_enable_force_include_usage", "test_tool_choice_content_none"),
        )
    ),
)
"""Files that nobody has looked at while the server was made to pass the others."""

FEATURES = (
    (
        "nothing: the model answers otherwise, or is a file",
        r"translategemma|complex_message|more_than_one_prompt_logprobs|check_models|response_format_json"
        r"|test_single_completion\[facebook|test_completion_streaming\[|chat_completion_with_tool_use|5 == 6"
        r"|anthropic_tool_call|anthropic_structured|test_reasoning_item|cancellation\[server_args0",
    ),
    ("wording", r"regex pattern|less_than_equal|invalid - assertionerror|'49152'|rust_frontend_version"),
    ("images", r"image|multimodal|nonetype' object has no attribute 'url_for"),
    ("LoRA adapters", r"lora"),
    ("reasoning_effort", r"reasoning_effort"),
    ("metrics of vLLM", r"test_metrics\.py"),
    ("Responses API", r"openai/responses/"),
    ("Anthropic Messages API", r"anthropic/"),
    ("usage without details", r"completionusa"),
    ("answers without x-request-id", r"test_no_request_id_header"),
    ("hand-over of KV between servers (kv_transfer_params)", r"kv_transfer_params"),
    ("ORCA header", r"orca"),
    ("beam search", r"beam"),
    ("/invocations", r"invocations"),
    ("Cohere API", r"v2_endpoint"),
    ("structured output", r"structured_outputs|guided_|response_format|json_schema"),
    ("tools", r"\btools?\b|tool_calls|tool_choice"),
)
"""What a failed test asks for, by its name and what it says."""


def fetch(cache: Path) -> Path:
    """Return vLLM's source tree, which pip fetches once."""
    target = cache / f"vllm-{VERSION}"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            # pip unpacks a source distribution, asks it for its metadata, and fails: it is not to be built.
            command = (
                *("-m", "pip", "download", "--no-deps", "--no-clean", "--no-build-isolation"),
                *("--no-binary=vllm", f"--dest={folder}/files", f"vllm=={VERSION}"),
            )
            subprocess.run(
                [sys.executable, *command],
                env=os.environ | {"TMPDIR": folder},
                check=False,
                capture_output=True,
            )
            found = next(Path(folder).glob("*/*/tests/entrypoints"), None)
            if found is None:
                raise SystemExit(
                    f"pip could not fetch the source of vllm {VERSION}; look at its index and network"
                )
            found.parents[1].rename(target)
    return target


def run(source: Path, files: Sequence[str], results: Path | None, chat_model: str) -> list[dict[str, str]]:
    """Return what became of each test."""
    root = Path(__file__).parents[3]
    with tempfile.TemporaryDirectory() as folder:
        results = (results or Path(folder) / "results.jsonl").absolute()
        results.write_text("")
        ini = Path(folder) / "pytest.ini"
        ini.write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
        entry = Path(folder) / "vllm/entrypoints/launchers/api_server/entry.py"  # which some tests run
        entry.parent.mkdir(parents=True)
        entry.write_text("from benchmarks.check.vllm_api.serve import main\nmain()\n")
        path = os.pathsep.join((str(root), str(root / "src"), folder))
        env = {**os.environ, "PYTHONPATH": path, "VLLM_API_RESULTS": str(results), CHAT_MODEL: chat_model}
        entrypoints = source / "tests/entrypoints"
        command = (
            *("-m", "pytest", "-p", "benchmarks.check.vllm_api.plugin", "-p", "no:cacheprovider", "-q"),
            *("-c", str(ini), f"--rootdir={source}", f"--confcutdir={entrypoints}", "--timeout=900"),
            *("-W", "ignore", "--continue-on-collection-errors", "--tb=line"),
            *(str(entrypoints / name) for name in files),
        )
        subprocess.run([sys.executable, *command], env=env, cwd=folder, check=False, stdout=sys.stderr)
        return [json.loads(line) for line in results.read_text().splitlines()]


def feature(result: dict[str, str]) -> str:
    """Return what a failed test asks for that onbeat lacks; else that it is none of the known."""
    text = f"{result['test']} {result['reason']}".lower()
    return next((name for name, pattern in FEATURES if re.search(pattern, text)), "other")


def report(results: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield the lines of a page."""
    counts = Counter(result["outcome"] for result in results)
    yield f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped\n"
    yield "| file | passed | failed | skipped |"
    yield "| --- | --- | --- | --- |"
    for name in dict.fromkeys(_file(result) for result in results):
        own = Counter(result["outcome"] for result in results if _file(result) == name)
        yield f"| {name} | {own['passed']} | {own['failed']} | {own['skipped']} |"
    failed = [result for result in results if result["outcome"] == "failed"]
    yield "\n| missing | tests |\n| --- | --- |"
    for name, number in Counter(map(feature, failed)).most_common():
        yield f"| {name} | {number} |"
    for outcome in ("failed", "skipped"):
        yield f"\n| {outcome} | why |\n| --- | --- |"
        for result in results:
            if result["outcome"] == outcome:
                reason = result["reason"].replace("|", "\\|")[:160]
                yield f"| {result['test'].split('entrypoints/')[-1]} | {reason} |"


def _file(result: dict[str, str]) -> str:
    return result["test"].split("::")[0].split("entrypoints/")[-1]


def main() -> None:
    """Fetch, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=FILES, help="test files below tests/entrypoints")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where vLLM's source is kept")
    parser.add_argument(
        "--chat-model", default="", help="what tests of larger chat models get (default: the embedded model)"
    )
    parser.add_argument("--aside", action="store_true", help="run the files that were set aside")
    parser.add_argument("--results", type=Path, help="keep what became of each test here, as JSON lines")
    options = parser.parse_args()
    chat_model = options.chat_model
    if Path(chat_model).exists():  # servers start elsewhere
        chat_model = str(Path(chat_model).absolute())
    files = ASIDE if options.aside else options.files
    for line in report(run(fetch(options.cache), files, options.results, chat_model)):
        print(line)


if __name__ == "__main__":
    main()
