"""`onbeat vllm`: the command line that vLLM gets, and records of a server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import pytest

from onbeat.cli import vllm
from onbeat.cli.args import parse
from onbeat.cli.main import build_parser, main
from onbeat.core.errors import ConfigError, MissingExtra
from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape, StepStats
from onbeat.recording.reader import Recording
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.replay.history import read_history
from onbeat.vllm.plugin_config import read_config
from onbeat.vllm.recorder import record
from onbeat.vllm.telemetry import Publisher, added_message, hello_message, request_message, step_message

ADDRESS = "ipc:///x/y"


def arguments(*words: str) -> list[str]:
    argv = ["vllm", "serve", *words]
    return vllm.vllm_arguments(parse(build_parser(argv), argv), ADDRESS)


def test_vllm_gets_its_options_as_they_are_and_ours_as_configuration(tmp_path):
    classes = tmp_path / "c.yaml"
    classes.write_text("classes:\n  - {name: chat, ttft_ms: 800}\n")
    ours = ["--slo-ttft-ms", "500", "--slo-class", "chat", "--slo-classes", str(classes), "--slo-mode=gap"]
    theirs = ["--max_model_len", "4096", "--additional-config", '{"other": 1}', "--port=8001", "-O3"]
    command = arguments("org/model", *ours, "--", *theirs)
    assert command[:6] == [
        *("serve", "org/model", "--scheduler-cls", "onbeat.vllm.SLOScheduler"),
        *("--middleware", "onbeat.vllm.SLOMiddleware"),
    ]
    assert command[8:] == ["--max_model_len", "4096", "--port=8001", "-O3"]
    config = json.loads(command[7])
    assert config["other"] == 1
    read = read_config(config, {})
    assert (read.slo.slo, read.slo.slo_class, read.slo.mode) == (SLO(ttft=0.5), "chat", "gap")
    assert (read.telemetry, read.calibrate) == (ADDRESS, "auto")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["m", "--", "--scheduler-cls", "x.Y"], "leave it out"),
        (["m", "--", "--scheduling_policy=priority"], "state objectives"),
        (["m", "--", "--additional-config", "{"], "no JSON"),
        (["m", "--", "--additional-config", '{"onbeat": {}}'], "without 'onbeat'"),
        (["m", "--slo-ttft-ms", "0"], "between 1 ms"),
        (["m", "--slo-class", "gold"], "no class 'gold'"),
        (["m", "--profile", "/nowhere"], "is no file"),
    ],
)
def test_what_does_not_go_together_is_said_before_vllm_starts(words, why):
    with pytest.raises(ConfigError, match=why):
        arguments(*words)


def test_words_behind_two_dashes_are_for_commands_that_pass_them_on(capsys):
    with pytest.raises(SystemExit):
        main(["models", "list", "--", "x"])
    assert "unknown flag --" in capsys.readouterr().err


def test_without_vllm_the_cure_is_named(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingExtra, match="pip install vllm"):
        vllm.find_vllm()


def test_a_server_of_this_user_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="0 servers"):
        vllm.only_address()
    address = vllm.own_address()
    folder = vllm.telemetry_folder()
    (folder / "99999999").touch()
    (folder / address.rpartition("/")[2]).touch()
    assert vllm.only_address() == address
    assert vllm.own_address() == address
    assert [path.name for path in folder.iterdir()] == [address.rpartition("/")[2]]
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="this user's alone"):
        vllm.telemetry_folder()


def stats(step: int) -> StepStats:
    return StepStats(step, step * 0.1, step * 0.1 + 0.08, BatchShape(), 1, 0, 9, 1, 0, 0, 0, 0.0, 0.0)


def messages():
    """Yield what a scheduler tells of one request with drafts, one refused and one that its client left."""
    for name in ("a", "b", "c"):
        request = Request(
            request_id=name,
            prompt_token_ids=range(20),
            sampling=SamplingParams(max_tokens=9),
            arrival=0.05,
            slo=SLO(ttft=1.0),
        )
        yield added_message(request, 0.06, slo_id=name, predicted_ttft=0.5)
    yield request_message("refused", "b", 0.07, status=429)
    yield step_message(stats(1), rows=[("a", 0, 16, False), ("before", 9, 1, True)], counts=[1])
    yield step_message(stats(2), rows=[("a", 16, 4, True), ("c", 0, 20, True)], counts=[1, 1])
    yield request_message("aborted", "c", 0.29)
    yield request_message("preempted", "a", 0.29)
    yield step_message(stats(3), rows=[("a", 0, 21, True)], counts=[1], preempted=["a"])
    yield {"kind": "step", "rank": 0, "stats": 5}
    yield step_message(stats(4), rows=[("a", 21, 3, True)], counts=[2], finished={"a": "stop"})


async def test_a_record_of_a_server_reads_back_as_what_happened(tmp_path):
    address, path = f"ipc://{tmp_path}/t", tmp_path / "run.gz"
    config = SchedulerConfig(
        num_blocks=64,
        block_size=16,
        max_model_len=512,
        policy="sarathi",
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )
    header = {
        "scheduler": asdict(config),
        "engine": {"model_name": "m", "device": "cpu", "vllm_version": "0.33"},
    }
    publisher = Publisher(address, hello_message(header))
    recording = asyncio.create_task(record(path, address))
    while not path.exists():
        await asyncio.sleep(0.01)
    for message in messages():
        publisher.send(message)
    await asyncio.sleep(0.3)
    recording.cancel()
    counts = await recording
    publisher.close()
    assert (counts.num_requests, counts.num_steps, counts.num_unknown_rows) == (3, 4, 1)
    history = read_history(Recording(path))
    first, refused, left = (request.record for request in history.requests)
    assert list(first.delivery_sizes) == [1, 1, 2]
    assert (first.finish_reason, first.num_preemptions) == ("stop", 1)
    assert first.ttft == pytest.approx(0.23)
    assert (refused.finish_reason, left.finish_reason) == ("expired", "abort")
    assert main(["replay", str(path)]) == 0


async def test_where_nobody_tells_anything_a_record_ends_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr("onbeat.vllm.recorder._PATIENCE", 0.05)
    with pytest.raises(ConfigError, match="is the server up"):
        await record(tmp_path / "r", f"ipc://{tmp_path}/t")
