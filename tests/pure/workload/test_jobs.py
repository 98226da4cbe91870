"""Jobs: what a file may say, what is drawn, and prompts that contain earlier answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from onbeat.core.errors import ConfigError
from onbeat.workload.job import Call, Job, read_jobs
from onbeat.workload.job_kinds import JOB_KINDS, draw_jobs, job_load, seconds_alone
from onbeat.workload.load import Load

CALL = {"input_tokens": 32, "output_tokens": 16}


def write(path: Path, *jobs: object) -> Path:
    path.write_bytes(b"\n".join(orjson.dumps(job) for job in jobs))
    return path


def test_a_file_of_jobs_is_read(tmp_path: Path) -> None:
    lines = (
        {"start_ms": 500, "class": "agent", "deadline_ms": 2000, "system_tokens": 64, "calls": [CALL] * 2},
        {
            "start_ms": 0,
            "calls": [
                {"id": "a", **CALL},
                {"id": "b", "continues": None, **CALL},
                {"quotes": ["a", "b"], "think_ms": 40, **CALL},
            ],
        },
    )
    first, second = read_jobs(write(tmp_path / "jobs.jsonl", *lines), None)
    assert (first.start, first.calls[2].quotes, first.calls[2].think) == (0.0, (0, 1), 0.04)
    assert first.calls_left == (1, 1, 0)
    assert (second.kind, second.deadline, second.calls[1].continues) == ("agent", 2.0, 0)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"calls": []}, "line 1: a job has no calls"),
        ({"calls": [{**CALL, "output_tokens": -1}]}, r"calls\[0\].output_tokens is -1; .* 0"),
        ({"calls": [{**CALL, "input_tokens": 10**12}]}, r"input_tokens is 1000000000000; .* 16777216"),
        ({"calls": [CALL], "system_tokens": 10**18}, r"system_tokens is 1000.*; .* 16777216"),
        ({"calls": [{**CALL, "input_tokens": "many"}]}, "input_tokens is 'many';"),
        ({"calls": [{**CALL, "quotes": ["x"]}]}, "call 'x',"),
        ({"calls": [CALL], "deadline": 5}, r"'deadline': .* deadline_ms"),
        ({"calls": [CALL], "deadline_ms": -5}, "is -0.005"),
        ({"calls": [CALL], "deadline_ms": 1e9}, "at most 24 h"),
        ({"calls": [{"text": "hi", "output_tokens": 1}]}, "give --tokenizer"),
        ({"calls": [{**CALL, "id": "a"}, {**CALL, "id": "a"}]}, "id 'a'"),
        ([1], r"\[1\]; it must be a mapping with class"),
    ],
)
def test_a_bad_job_is_named(tmp_path: Path, job: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_jobs(write(tmp_path / "jobs.jsonl", job), None)


def test_starts_are_given_to_all_jobs_or_to_none(tmp_path: Path) -> None:
    path = write(tmp_path / "jobs.jsonl", {"calls": [CALL]}, {"calls": [CALL], "start_ms": 1})
    with pytest.raises(ConfigError, match=r"2.*start_ms"):
        read_jobs(path, None)


def test_a_prompt_holds_the_one_before_it_and_its_answer() -> None:
    calls = (
        Call(input_tokens=40, output_tokens=24),
        Call(input_tokens=16, output_tokens=8, continues=0),
        Call(input_tokens=16, output_tokens=8, quotes=(0,)),
    )
    load = job_load("jobs", [Job(calls=calls), Job(calls=calls)], np.zeros(2))
    assert load.num_prompt_tokens.tolist() == [40, 80, 40] * 2
    assert load.block_ids is not None
    first, second, third, other = load.block_ids[:4]
    assert second[: len(first)] == first, "64 tokens of prompt and answer, in whole blocks"
    assert not set(third) & set(first)
    assert not set(other) & {*first, *second, *third}, "another job's words are others"


def test_jobs_of_a_kind_share_their_system_prompt() -> None:
    job = Job(calls=(Call(input_tokens=16, output_tokens=16),), system_tokens=32)
    load = job_load("jobs", [job, job], np.zeros(2))
    assert load.block_ids is not None
    one, other = load.block_ids
    assert (one[:2] == other[:2], one[2:] == other[2:]) == (True, False)


def test_a_job_is_skipped_or_taken_whole() -> None:
    short = Job(calls=(Call(input_tokens=8, output_tokens=8),) * 2)
    long = Job(calls=(*short.calls, Call(input_tokens=900, output_tokens=8)))
    load = job_load("jobs", [short, long, short], np.arange(3.0))
    kept = load.check_lengths(512, overlong="skip")
    assert (len(kept), kept.num_skipped) == (4, 3)
    assert kept.jobs is not None
    assert kept.jobs.firsts.tolist() == [0, 2]
    with pytest.raises(ConfigError, match="whole jobs"):
        load.take([0, 1, 2])


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_drawn_jobs_can_be_kept_and_are_drawn_alike(kind: str) -> None:
    draws = [draw_jobs(kind, 20, np.random.default_rng(3)) for _ in range(2)]  # type: ignore[arg-type]
    assert draws[0] == draws[1]
    for job in draws[0]:
        assert job.deadline >= 3 * seconds_alone(job, 0.02)
        assert job.calls_left[-1] == 0


def test_a_call_may_want_an_embedding(tmp_path: Path) -> None:
    embed = {"id": "query", "input_tokens": 30, "output_tokens": 0}
    (job,) = read_jobs(write(tmp_path / "jobs.jsonl", {"calls": [embed, {"after": ["query"], **CALL}]}), None)
    assert job.calls_left == (1, 0)
    load = job_load("jobs", [job], np.zeros(1))
    assert (load.num_prompt_tokens.tolist(), load.num_output_tokens.tolist()) == ([30, 32], [0, 16])
    with pytest.raises(ConfigError, match=r"call 1.*call 0"):
        read_jobs(write(tmp_path / "jobs.jsonl", {"calls": [embed, CALL]}), None)


def test_a_rate_of_jobs_counts_jobs() -> None:
    load = Load(dataset_name="map-reduce", num_prompts=10, request_rate=2.0).offered(
        max_model_len=2**17, overlong="error"
    )
    assert load.jobs is not None
    assert load.arrivals is not None
    assert len(load) > len(load.jobs.jobs) == 10
    assert load.rate == pytest.approx(10 / load.arrivals[-1])
    assert load.at_rate(0.5).rate == pytest.approx(0.5)
