"""Speculation through the real program: usage, metrics, timeline, `onbeat top` and the load client agree."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from onbeat import LLM, SamplingParams
from tests.cpu.e2e.conftest import SMOLLM2_FLAGS
from tests.cpu.e2e.program import SMALL, ServerProgram, run_program, serving

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "draft_length": "fixed"}
SPECULATES = ("--speculative-config", json.dumps(NGRAM))
SEED = 8
"""Of the random model: this one writes letters, where many repeat bytes that are no character."""
TINY = ("--load-format", "dummy", "--dtype", "float32", "--seed", str(SEED), *SMALL)
PROMPT = "the cat sat on the mat, the cat sat on the mat, " * 3


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[ServerProgram]:
    with serving(tiny_directory, *TINY, *SPECULATES, "--metrics-aliases", "vllm") as running:
        yield running


def complete(url: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 60, **fields}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def drafts_of(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage.get("completion_tokens_details", {})
    return details.get("accepted_prediction_tokens", 0), details.get("rejected_prediction_tokens", 0)


def test_usage_and_metrics_count_the_same_drafts(server: ServerProgram) -> None:
    before = server.metrics()
    usages = [complete(server.url)["usage"], complete(server.url, n=2, temperature=0.5, seed=1)["usage"]]
    after = server.metrics()

    def moved(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    accepted, rejected = (sum(numbers) for numbers in zip(*map(drafts_of, usages), strict=True))
    assert accepted > 0
    assert moved("onbeat_spec_accepted_tokens_total{ngram}") == accepted
    assert moved("onbeat_spec_draft_tokens_total{ngram}") == accepted + rejected
    assert moved("onbeat_output_tokens_total") == 180
    # Three first tokens are made by the prompts' last chunks.
    assert moved("onbeat_spec_delivered_tokens_total{ngram}") == 180 - 3
    assert moved("onbeat_time_between_tokens_seconds_count") == 180 - accepted - 3
    aliases = {
        name: value for name, value in after.items() if name.startswith("vllm:spec_decode_num_accepted")
    }
    assert accepted <= max(aliases.values()) == after["onbeat_spec_accepted_tokens_total{ngram}"]


@pytest.mark.slow
def test_the_text_is_the_same_without(server: ServerProgram, tiny_directory: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"temperature": 1.0, "seed": 7, "top_p": 0.9, "n": 2},
        {"max_tokens": 7, "presence_penalty": 0.5},
    ]
    with_drafts = [complete(server.url, **body) for body in bodies]
    with serving(tiny_directory, *TINY) as plain:
        without = [complete(plain.url, **body) for body in bodies]
        assert "onbeat_spec_drafts_total" not in httpx.get(f"{plain.url}/metrics").text
    for one, other in zip(with_drafts, without, strict=True):
        assert [choice["text"] for choice in one["choices"]] == [
            choice["text"] for choice in other["choices"]
        ]
        assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]
        assert drafts_of(other["usage"]) == (0, 0)
    tokens = [
        choice["logprobs"]["tokens"] for answer in (with_drafts, without) for choice in answer[0]["choices"]
    ]
    assert tokens[0] == tokens[1]


def test_nothing_behind_a_stop_string_is_shown_or_counted(server: ServerProgram) -> None:
    whole = complete(server.url, return_token_ids=True)["choices"][0]
    text = whole["text"]
    stop = text[len(text) // 2 :][:3]
    answer = complete(server.url, stop=stop, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["token_ids"] == whole["token_ids"][: answer["usage"]["completion_tokens"]]
    assert drafts_of(answer["usage"])[0] < answer["usage"]["completion_tokens"]


def test_offline_nothing_is_kept_behind_a_stop_string(tiny_directory: Path) -> None:
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "seed": SEED}
    options |= {"threads": 1, "max_model_len": 512}
    sampling = SamplingParams(temperature=0, max_tokens=60, num_logprobs=1)
    with LLM(str(tiny_directory), speculative_config=NGRAM, kv_cache_memory_bytes=2**22, **options) as llm:
        assert llm.info.speculation == "ngram"
        (whole,) = llm.generate(PROMPT, sampling, ignore_eos=True)
        stop = whole.text[len(whole.text) // 2 :][:3]
        (cut,) = llm.generate(PROMPT, sampling, stop=[stop], ignore_eos=True)
        assert llm.tokenizer.decode(cut.token_ids[:-1]).find(stop) == -1
        assert llm.tokenizer.decode(cut.token_ids).startswith(cut.text + stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert whole.logprobs is not None
    assert cut.logprobs == whole.logprobs[: len(cut.token_ids)]


def test_the_official_client_reads_a_stream(server: ServerProgram) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": PROMPT}],
            temperature=0,
            max_completion_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        *_, last = stream
    assert last.usage is not None
    assert last.usage.completion_tokens == 60
    assert last.usage.completion_tokens_details is not None
    assert last.usage.completion_tokens_details.accepted_prediction_tokens is not None
    assert last.usage.completion_tokens_details.rejected_prediction_tokens is not None


def test_top_shows_drafts(server: ServerProgram) -> None:
    complete(server.url)
    frame = run_program("top", "--once", server.url)
    assert frame.returncode == 0, frame.stderr
    assert "ngram proposes" in frame.stdout


@pytest.mark.slow
def test_a_bench_shows_acceptance(smollm2_gguf: Path, tmp_path: Path) -> None:
    """With the embedded model: prompts of known length need whole words as tokens."""
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    prompts.write_text((json.dumps({"prompt": PROMPT, "output_tokens": 20}) + "\n") * 4)
    dataset = ("--dataset-name", "custom", "--dataset-path", prompts)
    flags = ("--max-concurrency", "2", "--num-warmups", "0", "--ignore-eos", "--temperature", "0")
    with serving(smollm2_gguf, *SMOLLM2_FLAGS, *SPECULATES) as server:
        bench = run_program("bench", "serve", "--base-url", server.url, *dataset, *flags, "--json", file)
    assert bench.returncode == 0, bench.stderr
    assert "Speculation" in bench.stdout
    result = json.loads(file.read_text())
    assert result["spec_decode_source"] == "metrics"
    assert 0 < result["spec_decode_acceptance_rate"] <= 100
    assert 1 < result["spec_decode_acceptance_length"] <= 4


@pytest.mark.slow
def test_the_timeline_has_each_steps_drafts(tiny_directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    with serving(tiny_directory, *TINY, *SPECULATES, "--timeline", file) as server:
        complete(server.url)
        counted = server.metrics()
        server.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
    steps = [event["args"] for event in json.loads(file.read_text()) if event["name"] == "step"]
    for name, metric in (("verified", "draft"), ("accepted", "accepted")):
        total = sum(step.get(f"drafts_{name}", 0) for step in steps)
        assert total == counted[f"onbeat_spec_{metric}_tokens_total{{ngram}}"] > 0
