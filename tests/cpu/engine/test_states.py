"""What the start decides for models that keep a state of each request, and such a model behind the server."""

from __future__ import annotations

import ctypes
import mmap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onbeat.cli.profile import measured_loader
from onbeat.core.errors import ConfigError
from onbeat.engine.backends import base
from onbeat.engine.container import FreeMemory
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.input_batch import AttentionBatch, StepInputs
from onbeat.engine.profiling import profiler
from onbeat.engine.profiling.batches import BatchRow, MeasuredBatch
from onbeat.engine.profiling.measure import StepTimer
from onbeat.engine.start import build_engine, prepare
from onbeat.engine.step_time_spec import model_spec_of
from onbeat.hub.files import ModelFiles
from onbeat.perfmodel.model_spec import model_spec_from_hf
from onbeat.recording.reader import Recording
from onbeat.scheduler.scheduler_config import SchedulerLimits
from onbeat.simulator.replay.decisions import Replay
from onbeat.simulator.replay.model import learning_model
from onbeat.speculative_config import SpeculativeConfig
from tests.cpu.e2e.program import serving
from tests.cpu.e2e.test_policies import texts
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.cpu.speculation.runs import make_request

QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
STATE_BYTES = 3 * 4 * (4 * 16 * 16 + 3 * 128)
"""Of three layers: four matrices, and the last three inputs of the convolution, in float32."""
DRAFT_BYTES = 3 * 4 * (128 + 2 * 4)
"""Of a draft, beside the state: its inputs, and two gates of each value head."""
BLOCK_BYTES = 4 * 2 * 2 * 16 * 16
"""Of the layer that attends, 16 tokens."""


def drafts(num_speculative_tokens: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="ngram", num_speculative_tokens=num_speculative_tokens, prompt_lookup_min=1
    )


def config(path: Path, *, limits: SchedulerLimits | None = None, **asked: Any) -> EngineConfig:
    files = ModelFiles(kind="hf", path=write_tiny_directory(path, **QWEN3_5), name="tiny")
    limits = limits or SchedulerLimits(max_model_len=256)
    common: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1}
    return EngineConfig(model=files, limits=limits, **common, **asked)


def test_states_take_half_of_the_cache_and_bound_the_requests(tmp_path: Path) -> None:
    """Of twenty states' memory ten are states, a quarter of which is for prefixes."""
    cache_bytes = 20 * STATE_BYTES
    loader = prepare(config(tmp_path, kv_cache_memory_bytes=cache_bytes))
    assert (loader.limits.max_num_seqs, loader.limits.num_snapshots) == (8, 2)
    assert loader.limits.num_blocks == 10 * STATE_BYTES // BLOCK_BYTES
    assert loader.limits.enable_prefix_caching
    said: list[str] = []
    core, info = build_engine(config(tmp_path, kv_cache_memory_bytes=cache_bytes), said.append)
    core.shutdown()
    assert any(line.startswith("at most 8 requests run at once") for line in said)
    assert info.limits.moves_streams
    few = SchedulerLimits(max_model_len=256, max_num_seqs=1)
    limits = prepare(config(tmp_path, kv_cache_memory_bytes=cache_bytes, limits=few)).limits
    assert (limits.max_num_seqs, limits.num_snapshots, limits.num_blocks) == (1, 4, 16)
    bare = SchedulerLimits(max_model_len=256, enable_prefix_caching=False)
    limits = prepare(config(tmp_path, kv_cache_memory_bytes=cache_bytes, limits=bare)).limits
    assert (limits.max_num_seqs, limits.num_snapshots) == (10, 0)


def test_what_a_state_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv-cache-memory-bytes"):
        prepare(config(tmp_path, kv_cache_memory_bytes=STATE_BYTES))
    limits = SchedulerLimits(max_model_len=256, block_size=64)
    with pytest.raises(ConfigError, match="num_speculative_tokens is 33"):
        prepare(config(tmp_path, limits=limits, speculative=drafts(33)))


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_drafts_take_room_beside_each_state(tmp_path: Path, backend: str) -> None:
    state_bytes = STATE_BYTES + 5 * DRAFT_BYTES
    asked = config(tmp_path, kv_cache_memory_bytes=20 * state_bytes, speculative=drafts(5), backend=backend)
    loaded = prepare(asked).load(lambda _: None)
    assert (loaded.limits.max_num_seqs, loaded.limits.num_snapshots) == (8, 2)
    assert loaded.limits.num_blocks == 10 * state_bytes // BLOCK_BYTES
    held = sum(region.block_bytes for region in loaded.runner.forward.state_regions())
    assert state_bytes <= held < 1.05 * state_bytes
    loaded.runner.close()


def test_an_idle_engine_takes_the_memory_of_all_states(tmp_path: Path) -> None:
    """A step that writes to memory for the first time waits for it."""
    cache_bytes = 20 * STATE_BYTES
    loaded = prepare(config(tmp_path, kv_cache_memory_bytes=cache_bytes)).load(lambda _: None)
    (region,) = loaded.runner.forward.state_regions()
    num_bytes = (loaded.limits.max_num_seqs + (loaded.limits.num_snapshots or 0)) * region.block_bytes
    first = region.address // mmap.PAGESIZE * mmap.PAGESIZE
    in_memory = (ctypes.c_ubyte * (-(-(region.address + num_bytes - first) // mmap.PAGESIZE)))()

    for _ in range(10_000):
        if not loaded.runner.touch_ahead():
            break
    size = ctypes.c_size_t(len(in_memory) * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), size, in_memory) == 0
    assert sum(page & 1 for page in in_memory) == len(in_memory)
    loaded.runner.close()


@pytest.mark.parametrize("most", [0, 3])
def test_as_many_drafts_are_timed_as_states_have_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    seen: list[MeasuredBatch] = []

    def measure(_: Any, batches: list[MeasuredBatch], *__: Any) -> list[None]:
        seen.extend(batches)
        return [None] * len(batches)

    monkeypatch.setattr(profiler, "measure_in_rounds", measure)
    loaded = prepare(config(tmp_path, speculative=drafts(most) if most else None)).load(lambda _: None)
    with pytest.raises(ConfigError, match="only 0 batches"):
        profiler.profile_model(loaded, profiler.QUICK)
    loaded.runner.close()
    assert len(seen) > 10
    assert max(row.num_drafts for batch in seen for row in batch.rows) == most
    assert all(
        row.num_new_tokens == 1 + row.num_drafts for batch in seen for row in batch.rows if row.num_drafts
    )


def test_a_profile_times_drafts_beside_states_that_take_in_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = measured_loader(config(tmp_path)).load(lambda _: None)
    assert loaded.limits.most_drafts == 7
    assert loaded.proposer is None
    steps: list[AttentionBatch] = []
    forward: Any = loaded.runner.forward
    run = forward.run

    def noted(inputs: StepInputs, **more: Any) -> Any:
        steps.append(inputs.attention)
        return run(inputs, **more)

    monkeypatch.setattr(forward, "run", noted)
    timer = StepTimer(loaded.runner, num_blocks=8)
    rows = BatchRow(40, 8, num_drafts=7), BatchRow(1, 4, num_drafts=3), BatchRow(9, 1), BatchRow(0, 5)
    for _ in range(2):
        assert timer.time(MeasuredBatch(rows)) > 0
        np.testing.assert_array_equal(steps[-1].pending_R, [4, 1, 0, 0])
        np.testing.assert_array_equal(steps[-1].untaken_R, [7, 3, 0, 0])
    timer.close()
    loaded.runner.close()


def test_weights_that_do_not_fit_are_named_before_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "free_for", lambda _share, _device: FreeMemory(0, "the sandbox"))
    with pytest.raises(ConfigError, match=r"weights take .* the sandbox leaves 0 MiB; even with .*int4"):
        prepare(config(tmp_path))


def test_step_times_know_the_states(tmp_path: Path) -> None:
    """The engine's own description has the sizes that the configuration gives the simulator."""
    own = model_spec_of(prepare(config(tmp_path)).backend.model, "tiny")
    hf = QWEN3_5 | {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 259,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": True,
    }
    assert own == model_spec_from_hf(hf, name="tiny")
    assert (own.state_bytes, own.draft_state_bytes) == (STATE_BYTES, DRAFT_BYTES)


@pytest.mark.parametrize(
    ("policy", "num_drafts"), [("sarathi", 0), ("sarathi", 4), pytest.param("slo", 0, marks=pytest.mark.slow)]
)
def test_a_replayed_run_decides_as_the_live_one(tmp_path: Path, policy: str, num_drafts: int) -> None:
    """With prefix hits from kept states, preemptions, and drafts."""
    record = tmp_path / "run.jsonl"
    limits = SchedulerLimits(max_model_len=256, max_num_batched_tokens=64, policy=policy)
    core, _ = build_engine(
        config(
            tmp_path / "model",
            limits=limits,
            record=record,
            kv_cache_memory_bytes=10 * (STATE_BYTES + num_drafts * DRAFT_BYTES),
            speculative=drafts(num_drafts) if num_drafts else None,
        ),
        lambda _: None,
    )
    for turn in range(3):
        for index in range(8):
            prompt = [*range(60), *(index + 100 for _ in range(40 + 20 * turn))]
            request = make_request(f"{turn}-{index}", prompt, 40, temperature=0.0)
            core.add(replace(request, arrival=time.monotonic()))
        while core.has_work:
            core.step()
    scheduler = core.scheduler
    core.shutdown()
    recording = Recording(record)
    replay = Replay(recording, learning_model(recording.header))
    result = replay.run()
    assert result.difference is None
    assert result.num_prefix_hits == scheduler.table.num_prefix_hits > 60
    assert result.num_preemptions == scheduler.table.num_preemptions
    assert result.num_preemptions or policy == "slo"
    assert scheduler.kv.snapshots.num_used
    assert replay.scheduler.kv.snapshots.num_used == scheduler.kv.snapshots.num_used


@pytest.mark.slow
def test_served(tmp_path: Path) -> None:
    """Requests at once, more than there are slots, get the answers that each gets alone."""
    write_tiny_directory(tmp_path, **QWEN3_5)
    flags = ("--load-format", "dummy", "--dtype", "float32", "--threads", "1", "--max-model-len", "1024")
    with serving(tmp_path, *flags) as server, serving(tmp_path, *flags, "--max-num-seqs", "2") as short:
        assert texts(server) == texts(short)
        with serving(tmp_path, *flags, "--disaggregate", "prefill=1,decode=1") as fleet:
            assert texts(fleet) == texts(server)
            moves = fleet.metrics()
    counts = {key: count for key, count in moves.items() if key.startswith("onbeat_fleet_moves_total")}
    assert sum(count for key, count in counts.items() if "moved" in key) > 0, counts
