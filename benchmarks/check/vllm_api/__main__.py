"""Run vLLM's tests of its HTTP API against onbeat, and say for each that fails why.

Fetches the source distribution of vLLM into a cache folder (pip downloads and unpacks it; nothing is built
or installed), and runs the tests below with their assertions. Their server is an onbeat server of another
model: the embedded one for small models, Gemma 3 270M for base models (`onbeat models fetch gemma3-270m`),
and for all others what `--chat-model` names. The tests import more than onbeat:
`pip install -e '.[torch,dev,clients]' anthropic psutil pybase64`.
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
            *("chat_completion/test_completion_with_function_calling", "responses/test_function_call"),
        )
    ),
)
"""Files that nobody has looked at while the server was made to pass the others."""

REASONS = (
    ("LoRA|hermes.*llama", "no LoRA adapters"),
    ("invocations_chat", "model served in place: it answers chats, so `/invocations` does not embed them"),
    ("base64_embedding|score_api_(queries|text|data)|embed.*completion", "the test's own model is not there"),
    ("dtype_and_endianness", "the test reads answers by vLLM's own Python"),
    ("rerank_api_max|params_not_supported|pooling_not_supported", "an error as wanted, in other words"),
    ("test_padding", "no padding; a 400 says so"),
    ("pooling/", "model served in place: its tokens, or the numbers of its embeddings, are others"),
    ("hermes.*granite4|test_function_call.py", "model served in place: it writes calls without their marks"),
    ("responses/test_basic|test_structured_output.py", "model served in place: it answers otherwise"),
    ("multimodal", "no images"),
    ("test_uds", "no Unix sockets"),
    ("beam|batch_completions", "no beam search"),
    ("long_seed|empty_prompt", "a 400 as wanted, in other words"),
    ("echo.*prompt_logprobs", "4.3 million log-probabilities are more than an answer holds"),
    ("tokenize_chat_with_tools", "a template without tools: onbeat shows them to the model, vLLM drops them"),
    ("check_models", "model served in place: `root` is its file"),
    ("reasoning_item|reasoning_tokens", "model served in place: it does not reason"),
    ("tool_call|tool_use", "model served in place: it writes calls without their marks"),
    ("more_than_one_prompt_logprobs", "model served in place: it finds another token likelier"),
    ("single_chat_session", "model served in place: its prompt has another length"),
    (
        "chat_streaming|comparison_with_prompt|simple.py::test_max_tokens",
        "model served in place: its answer ends sooner",
    ),
    ("json_schema", "model served in place: it names the field, which the schema leaves open, otherwise"),
    ("translategemma", "model served in place: it does not translate"),
    ("anthropic_streaming", "cached tokens are no input_tokens, as in Anthropic's API"),
)
"""Why tests fail, by a pattern of their names; the first that fits counts."""


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


def reason(result: dict[str, str]) -> str:
    """Return why a test failed, in words if they are known."""
    known = (why for pattern, why in REASONS if re.search(pattern, result["test"], re.IGNORECASE))
    return next(known, result["reason"].replace("|", "\\|")[:160])


def report(results: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield the lines of a page."""
    counts = Counter(result["outcome"] for result in results)
    passed, failed = counts["passed"], counts["failed"]
    yield f"{passed} of {passed + failed} passed; {counts['skipped']} more test no server."
    less = sum(result["outcome"] == "passed" and bool(result["left_out"]) for result in results)
    yield f"{less} that passed had a server without flags that onbeat does not take.\n"
    yield "| file | passed | failed | skipped | flags left out |"
    yield "| --- | --- | --- | --- | --- |"
    for name in dict.fromkeys(_file(result) for result in results):
        own = Counter(result["outcome"] for result in results if _file(result) == name)
        if not own["passed"] + own["failed"]:
            continue
        flags = dict.fromkeys(
            flag for result in results if _file(result) == name for flag in result["left_out"].split()
        )
        shown = ", ".join(f"`{flag}`" for flag in flags)
        yield f"| `{name}` | {own['passed']} | {own['failed']} | {own['skipped']} | {shown} |"
    yield "\nWhy tests fail:\n"
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result["outcome"] == "failed":
            name = result["test"].split("::")[-1].partition("[")[0].removeprefix("test_")
            reasons.setdefault(reason(result), []).append(name)
    for why, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        told = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
        yield f"- {len(names)}: {why} ({told})"


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
    if chat_model and Path(chat_model).exists():  # servers start elsewhere
        chat_model = str(Path(chat_model).absolute())
    files = ASIDE if options.aside else options.files
    for line in report(run(fetch(options.cache), files, options.results, chat_model)):
        print(line)


if __name__ == "__main__":
    main()
