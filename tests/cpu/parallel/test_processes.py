"""An engine whose other ranks are processes: same tokens, a killed rank is an error, and no process stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onbeat.core.errors import ConfigError, EngineDead
from onbeat.core.request import SamplingParams
from onbeat.engine.llm import LLM
from tests.cpu.e2e.program import is_running
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.cpu.parallel.processes import rank_pids
from tests.waiting import patience, wait_for

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[5] * 3, list(range(1, 90)), list(range(1, 90)), [7, 8, 9] * 20]
"""With a budget of 32 tokens the long ones are cut in chunks; the second of two equal ones finds a prefix."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_directory(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def make_llm(directory: Path) -> Callable[..., LLM]:
    def make(size: int, **options: Any) -> LLM:
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "float32",
            "backend": "torch",
            "device": "cpu",
            "kv_cache_memory_bytes": 2**24,
            "max_model_len": 512,
            "policy": "sarathi",
            "max_num_batched_tokens": 32,
            "max_num_seqs": 8,
            "step_time_profile": "none",
            "tensor_parallel_size": size,
        }
        return LLM(str(directory), **{**settings, **options})

    return make


def tokens_of(llm: LLM) -> list[list[int]]:
    first = llm.generate(PROMPTS, GREEDY, ignore_eos=True)
    again = llm.generate(PROMPTS[1:2], GREEDY, ignore_eos=True)
    assert again[0].num_cached_tokens > 0
    return [generation.token_ids for generation in first + again]


def test_two_processes_give_the_tokens_of_one_and_a_killed_one_is_an_error(
    make_llm: Callable[..., LLM],
) -> None:
    with make_llm(1) as llm:
        expected = tokens_of(llm)
    with make_llm(2) as llm:
        assert tokens_of(llm) == expected
        [pid] = rank_pids(os.getpid())
        os.kill(pid, signal.SIGKILL)
        with patience() as taken:
            for _ in range(2):
                with pytest.raises(EngineDead, match=rf"rank 1 \(process {pid}\) was ended by SIGKILL"):
                    llm.generate(PROMPTS, GREEDY)
        assert taken.seconds < 5
    assert rank_pids(os.getpid()) == []


def generate_for_ever(llm: LLM) -> None:
    while True:
        llm.generate([list(range(200)) * 40], GREEDY, ignore_eos=True)


@pytest.mark.slow
def test_a_rank_killed_within_a_step_ends_the_step(make_llm: Callable[..., LLM]) -> None:
    with make_llm(4, max_num_batched_tokens=8192, max_model_len=8192, kv_cache_memory_bytes=2**26) as llm:
        pids = rank_pids(os.getpid())
        assert len(pids) == 3
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {pids[1]}"])
        with pytest.raises(EngineDead, match=r"rank 2 .* was ended by SIGKILL"):
            generate_for_ever(llm)
        killer.wait()
        assert not any(is_running(pid) for pid in pids)


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(directory: Path) -> None:
    code = f"""
from onbeat.engine.llm import LLM
llm = LLM({str(directory)!r}, load_format="dummy", dtype="float32", device="cpu", backend="torch",
          kv_cache_memory_bytes=2**24, max_model_len=512, step_time_profile="none", policy="sarathi",
          tensor_parallel_size=3 - 1)
print("ready", flush=True)
import time
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    [rank] = rank_pids(process.pid)
    os.kill(rank, signal.SIGINT)
    os.kill(rank, signal.SIGTERM)
    time.sleep(0.5)
    assert is_running(rank), "a signal to all processes must not end a rank before the first one"
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: not is_running(rank), timeout=5)


def test_what_cannot_be_split_is_refused_before_a_process_starts(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match=r"3 does not divide .* 4 query heads .* sizes that do: 1, 2, 4"):
        make_llm(3)
    assert rank_pids(os.getpid()) == []


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(make_llm: Callable[..., LLM], size: int) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}; it must be at least 1"):
        make_llm(size)


def test_the_native_backend_runs_one_rank(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match=r"tensor parallel.* torch backend"):
        make_llm(2, backend="native")
