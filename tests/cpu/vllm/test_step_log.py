"""`onbeat.vllm.StepLog` on a fake of vLLM's interface: what it writes of which steps, and when it refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import onbeat.vllm
from onbeat.core.errors import ConfigError
from onbeat.perfmodel.logged_step import step_times
from onbeat.perfmodel.step_log import read_step_log

KV_TOKENS = 1600


@pytest.fixture
def step_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """Return the class as vLLM loads it, by its entry point, with a vLLM that has what it takes of it."""
    parts: dict[str, dict[str, object]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.logger": {"init_logger": __import__("logging").getLogger},
        "vllm.v1": {},
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.loggers": {"StatLoggerBase": object},
        "vllm.platforms": {
            "current_platform": SimpleNamespace(
                is_cpu=lambda: False, get_device_name=lambda: "NVIDIA H100 80GB HBM3"
            )
        },
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    yield onbeat.vllm.StepLog
    del sys.modules["onbeat.vllm.step_log"]


def config(**changes: Any) -> SimpleNamespace:
    """Return the fields of vLLM's configuration that are read."""
    return SimpleNamespace(
        observability_config=SimpleNamespace(enable_logging_iteration_details=changes.get("details", True)),
        speculative_config=changes.get("speculative"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            _api_process_count=changes.get("servers", 1),
        ),
        cache_config=SimpleNamespace(num_gpu_blocks=KV_TOKENS // 16, block_size=16),
        scheduler_config=SimpleNamespace(async_scheduling=changes.get("ahead", False)),
        model_config=SimpleNamespace(model="org/Model", dtype="torch.bfloat16", quantization=None),
    )


def step(
    prompts: int = 0,
    tokens: int = 0,
    decodes: int = 0,
    *,
    running: int = 0,
    held: int = 0,
    distance: float | None = None,
    started: int = 0,
    finished: tuple[SimpleNamespace, ...] = (),
    is_dummy: bool = False,
) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return the statistics of one step, as vLLM's front process hands them on."""
    details = SimpleNamespace(
        num_ctx_requests=prompts,
        num_ctx_tokens=tokens,
        num_generation_requests=decodes,
        elapsed_ms=0.5,
        is_dummy=is_dummy,
        num_encoder_inputs=0,
    )
    scheduler = SimpleNamespace(
        iteration_details=details,
        num_running_reqs=running,
        num_waiting_reqs=0,
        num_skipped_waiting_reqs=0,
        kv_cache_usage=held / KV_TOKENS,
    )
    iteration = SimpleNamespace(
        inter_token_latencies_iter=[] if distance is None else [distance + 0.02, distance],
        time_to_first_tokens_iter=[1.0] * started,
        prompt_token_stats=SimpleNamespace(local_cache_hit=0),
        finished_requests=list(finished),
    )
    return scheduler, iteration


def request(num_prompt_tokens: int, **changes: Any) -> SimpleNamespace:
    fields = {"num_cached_tokens": 0, "num_preemptions": 0, "prefill_time": 0.03, "queued_time": 0.001}
    fields |= {"inference_time": 0.2, "e2e_latency": 0.215}
    return SimpleNamespace(num_prompt_tokens=num_prompt_tokens, **(fields | changes))


def test_it_is_not_there_before_vllm_is() -> None:
    if "vllm" not in sys.modules:
        assert "onbeat.vllm.step_log" not in sys.modules


def test_a_run_becomes_a_file(step_log: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv("ONBEAT_STEP_LOG", str(path))
    log = step_log(config())
    log.log_engine_initialized()
    for scheduler, iteration in (
        step(1, 40, running=1, held=48, started=1),  # one prompt, after idleness
        step(0, 0, 1, running=1, held=48, distance=0.011),
        step(1, 24, 1, running=2, held=80, distance=0.015, started=1),
        step(is_dummy=True, running=2, held=80),
        step(0, 0, 2, distance=0.012, finished=(request(40), request(24))),
    ):
        log.record(scheduler, iteration, mm_cache_stats=None, engine_idx=0)
    log.record(None, None)
    stream = read_step_log(path)
    origin = stream.origin
    assert (origin.engine, origin.engine_version, origin.model) == ("vllm", "0.32.0", "org/Model")
    assert (origin.dtype, origin.tensor_parallel, origin.steps_ahead) == ("bf16", 2, 0)
    assert origin.device_name == "NVIDIA H100 80GB HBM3"
    assert [each.distance for each in stream.steps] == [0.011, 0.015, 0.03, 0.012]
    decode, mixed, prompt, two = (each.shape for each in stream.steps)
    assert (decode.num_decodes, decode.decode_context_tokens) == (1, 41)
    assert (mixed.num_chunks, mixed.num_chunk_tokens, mixed.decode_context_tokens) == (1, 24, 41)
    assert (prompt.num_chunks, prompt.num_new_tokens, prompt.chunk_cached_tokens) == (1, 40, 0)
    assert (two.num_decodes, two.decode_context_tokens) == (2, 66)
    assert stream.request_seconds == pytest.approx([0.014])
    assert len(step_times(stream.steps).steps) == 4


def test_a_prompt_in_chunks_reads_what_came_before(
    step_log: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONBEAT_STEP_LOG", str(tmp_path / "steps.jsonl"))
    log = step_log(config())
    log.record(*step(0, 0, 1, running=1, held=88, distance=0.01))
    log.record(*step(1, 64, 1, running=2, held=160, distance=0.02))
    log.record(*step(1, 32, 1, running=2, held=192, distance=0.02, started=1))
    last = read_step_log(tmp_path / "steps.jsonl").steps[-1].shape
    assert (last.chunk_cached_tokens, last.decode_context_tokens) == (64, 81)


def test_it_does_nothing_unless_a_file_is_named(step_log: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONBEAT_STEP_LOG", raising=False)
    log = step_log(config(details=False))
    log.record(*step(0, 0, 1, distance=0.01))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"details": False}, "start it with --enable-logging-iteration-details"),
        ({"speculative": object()}, "leave out --speculative-config"),
        ({"servers": 2}, "give --api-server-count 1"),
    ],
)
def test_a_server_that_cannot_tell_is_refused_at_start(
    step_log: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.setenv("ONBEAT_STEP_LOG", str(tmp_path / "steps.jsonl"))
    with pytest.raises(ConfigError, match=words):
        step_log(config(**changes))


def test_a_vllm_that_tells_otherwise_goes_on_serving(
    step_log: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ONBEAT_STEP_LOG", str(tmp_path / "steps.jsonl"))
    log = step_log(config())
    log.record(SimpleNamespace(iteration_details=SimpleNamespace()), None)
    log.record(*step(0, 0, 1, distance=0.01))
    assert "onbeat stops to write steps down" in caplog.text
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1
