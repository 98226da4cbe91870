"""Readers of recorded workloads: small files, bad files, and the published traces where they are at hand."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onbeat.core.errors import ConfigError
from onbeat.workload.trace import read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.2299600,3180,8\n2023-11-16 18:17:05,7,1\n"
)
MOONCAKE_CSV = "timestamp_ms,input_length,output_length,hash_ids\n0,700,50,4 9\n1500,512,5,4\n"
MOONCAKE_JSONL = (
    '{"timestamp": 0, "input_length": 700, "output_length": 50, "hash_ids": [4, 9]}\n\n'
    '{"timestamp": 1500, "input_length": 512, "output_length": 5, "hash_ids": [4]}\n'
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
)
LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.csv", AZURE))

    assert trace.kind == "azure"
    assert trace.num_prompt_tokens.tolist() == [4808, 3180, 7]
    assert trace.num_output_tokens.tolist() == [10, 8, 1]
    assert trace.times is not None
    np.testing.assert_allclose(np.diff(trace.times), [0.25, 0.77004], atol=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "between"),
    [
        ("2024-05-10 00:00:00.5-05:00", "2024-05-10 00:00:01.5-05:00", 1.0),
        ("2024-05-10T00:00:00.5Z", "2024-05-10 00:00:01+0000", 0.5),
        # Summer time ends: the hour from 02:00 comes twice.
        ("2024-10-27 02:59:59.5+02:00", "2024-10-27 02:00:00.25+01:00", 0.75),
        ("2023-12-31 23:59:59.9", "2024-01-01 00:00:00.1", 0.2),
    ],
)
def test_times_keep_their_fraction_and_their_offset(
    tmp_path: Path, first: str, second: str, between: float
) -> None:
    header = AZURE.partition("\n")[0]
    trace = read_trace(write(tmp_path / "a.csv", f"{header}\n{first},5,3\n{second},5,3\n"))

    assert trace.times is not None
    assert trace.times[1] - trace.times[0] == pytest.approx(between, abs=1e-6)


@pytest.mark.parametrize("text", [MOONCAKE_CSV, MOONCAKE_JSONL])
def test_mooncake_in_both_forms(tmp_path: Path, text: str) -> None:
    trace = read_trace(write(tmp_path / "m", text))

    assert trace.kind == "mooncake"
    assert trace.block_ids == ((4, 9), (4,))
    assert trace.times is not None
    assert trace.times.tolist() == [0.0, 1.5]
    assert trace.num_prompt_tokens.tolist() == [700, 512]


def test_burstgpt_and_lengths(tmp_path: Path) -> None:
    burst = read_trace(write(tmp_path / "b.csv", BURSTGPT))
    lengths = read_trace(write(tmp_path / "l.csv", LENGTHS))

    assert (burst.kind, burst.num_output_tokens.tolist()) == ("burstgpt", [18])
    assert (lengths.kind, lengths.times, lengths.num_prompt_tokens.tolist()) == ("lengths", None, [74])


def test_lengths_with_arrivals_keep_them(tmp_path: Path) -> None:
    header = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
    trace = read_trace(write(tmp_path / "v.csv", header + "0.5,74,12\n2.5,30,7\n"))

    assert trace.kind == "vidur"
    assert trace.times is not None
    assert trace.times.tolist() == [0.5, 2.5]
    with pytest.raises(ConfigError, match=r"line 2: .* -1 s"):
        read_trace(write(tmp_path / "w.csv", header + "-1,74,12\n"))


def test_gzip_is_read_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(gzip.compress(AZURE.encode()))

    assert len(read_trace(path)) == 3


def test_take_keeps_all_columns_together(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "m", MOONCAKE_CSV)).take(np.array([1]))

    assert trace.block_ids == ((4,),)
    assert trace.num_prompt_tokens.tolist() == [512]
    assert trace.times is not None
    assert trace.times.tolist() == [1.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("a,b\n1,2\n", r"line 1: unknown columns a, b\. Known are azure"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        (AZURE + "2023-11-16 18:17:06,many,3\n", r"line 5: bad value .*many"),
        (AZURE + "yesterday,5,3\n", r"line 5: bad value .*yesterday"),
        (AZURE + "2023-11-16 18:17:06,-4,3\n", "line 5: a negative length"),
        (AZURE + "2023-11-16 18:17:06,4\n", r"line 5: .* 3"),
        (MOONCAKE_JSONL + "{broken\n", "line 4 is not JSON"),
        (MOONCAKE_JSONL + "[1]\n", r"line 4: .* \[1\];"),
        (MOONCAKE_JSONL + '{"timestamp": 3}\n', "line 4: bad value"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "bad.csv", text)

    with pytest.raises(ConfigError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_another_kind_than_asked_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"azure.*mooncake"):
        read_trace(write(tmp_path / "a.csv", AZURE), kind="mooncake")


def test_unreadable_files_are_clear_errors(tmp_path: Path) -> None:
    damaged = tmp_path / "t.csv.gz"
    damaged.write_bytes(gzip.compress(AZURE.encode())[:-9])
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"\xff\xfe\x00\x81")

    with pytest.raises(ConfigError, match=r"\.csv\.gz.*damaged"):
        read_trace(damaged)
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(binary)
    with pytest.raises(ConfigError, match=r"missing\.csv: No such"):
        read_trace(tmp_path / "missing.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MOONCAKE_CSV + "1400,5,5,7\n", r"line 4: .* 0\.1 .* 3;"),
        (MOONCAKE_CSV.replace("\n0,", "\n-20,"), r"line 2: .* -0\.02"),
        (MOONCAKE_CSV.replace("1500", "nan"), "line 3: the time is nan"),
    ],
)
def test_times_that_run_backwards_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path / "m.csv", text))


def test_other_columns_of_lengths(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", "id,in,out\na,5,7\nb,6,8\n")
    trace = read_trace(path, columns=("in", "out"))

    assert (trace.kind, trace.num_prompt_tokens.tolist()) == ("lengths", [5, 6])
    assert trace.lines is not None
    assert trace.lines.tolist() == [2, 3]
    with pytest.raises(ConfigError, match=r"1.*'prompt'"):
        read_trace(path, columns=("prompt", "out"))


@pytest.mark.parametrize("cut", [lambda packed: packed[:-20], lambda packed: packed[:30] + packed[40:]])
def test_damaged_gzip_in_every_way(tmp_path: Path, cut: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(cut(gzip.compress((AZURE * 20).encode())))

    with pytest.raises(ConfigError, match=r"\.csv\.gz.*damaged"):
        read_trace(path)
