"""`onbeat bench` as a user runs it."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from pathlib import Path

import pytest

from onbeat.cli.main import main
from tests.cpu.bench.background import SMALL, Background, bench, load
from tests.fake_openai import FakeOpenAI, serving
from tests.waiting import until


def test_a_run_prints_its_table_and_saves_json_and_report(
    server: Background, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "r.json"), "--report", str(tmp_path / "r.html")]

    code = bench(
        server, *SMALL, "--num-prompts", "12", "--max-concurrency", "3", "--goodput", "ttft:5000", *files
    )

    out = capsys.readouterr().out
    assert code == 0
    for word in ("TTFT", "TPOT", "TBT", "E2E", "output throughput", "objectives met"):
        assert word in out
    assert load(tmp_path / "r.json")["completed"] == 12
    assert "<!doctype html>" in (tmp_path / "r.html").read_text()


def test_a_run_of_nothing_but_failures_is_no_success(
    server: Background, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    with Background(FakeOpenAI(fail_every=1, fault="status:400")) as failing:
        code = bench(failing, *SMALL, "--num-prompts", "3", "--json", str(path))
    assert code == 1
    assert load(path)["failed"] == 3
    assert "HTTP 400" in capsys.readouterr().out

    with Background(FakeOpenAI(fail_every=1, fault="status:429")) as refusing:
        assert bench(refusing, *SMALL, "--num-prompts", "3") == 0  # a refusal is an answer
    with Background(FakeOpenAI(fail_every=2, fault="status:400")) as flaky:
        assert bench(flaky, *SMALL, "--num-prompts", "4") == 0


def test_a_sweep_runs_every_level_with_fresh_words(server: Background, tmp_path: Path) -> None:
    path = tmp_path / "s.json"

    sweeps = ["--sweep-concurrency", "1,2", "--sweep-rate", "50"]
    bench(server, *SMALL, "--num-prompts", "4", *sweeps, "--json", str(path))

    runs = load(path)["runs"]
    assert [(run["title"], run["max_concurrency"], run["request_rate"]) for run in runs] == [
        ("c=1", 1, "inf"),
        ("c=2", 2, "inf"),
        ("50 req/s", None, 50.0),
    ]
    prompts = [body["prompt"] for body in server.fake.bodies]
    assert len(set(prompts)) == 12


def test_a_rate_sweep_can_have_constant_arrivals(server: Background, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    flags = ["--arrivals", "constant", "--sweep-rate", "20,40", "--json", str(path)]

    bench(server, *SMALL, "--num-prompts", "3", *flags)

    assert [(run["arrivals"], run["request_rate"]) for run in load(path)["runs"]] == [
        ("constant", 20.0),
        ("constant", 40.0),
    ]


@pytest.mark.slow
def test_objectives_by_class_are_scored_apart(server: Background, tmp_path: Path) -> None:
    config = tmp_path / "slo.yaml"
    config.write_text(
        "classes: [{name: easy, ttft_ms: 60000, share: 0.75}, {name: hard, e2e_ms: 1, share: 0.25}]"
    )
    path = tmp_path / "r.json"
    flags = ["--num-prompts", "8", "--arrivals", "poisson", "--request-rate", "200", "--json", str(path)]

    assert bench(server, *SMALL, *flags, "--slo-config", str(config)) == 0

    result = load(path)
    assert result["slo_mode"] == "stream"
    assert {name: group["offered"] for name, group in result["classes"].items()} == {"easy": 6, "hard": 2}
    assert result["classes"]["easy"]["attainment"] == 1.0
    assert result["attainment"] == sum(group["good"] for group in result["classes"].values()) / 8


def test_refusals_and_lengths_are_shown_saved_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeOpenAI(
        owned_by="onbeat", verdict={"met": True, "ttft_ms": 1.0}, fail_every=4, fault="status:429"
    )
    path, page = tmp_path / "r.json", tmp_path / "r.html"
    flags = ["--num-prompts", "16", "--max-concurrency", "2", "--slo-ttft-ms", "60000", "--shed"]
    flags += ["--random-long-share", "0.25", "--random-long-input-len", "30"]

    with Background(fake) as background:
        code = bench(background, *SMALL, *flags, "--json", str(path), "--report", str(page))

    assert code == 0
    assert fake.bodies[0]["slo"] == {"ttft_ms": 60000.0, "shed": True}
    assert load(path)["attainment_admitted"] == 1.0
    out = capsys.readouterr().out
    for text in (out, page.read_text()):
        for wanted in ("12 of 16", "objectives met, of admitted", "refused after P50 / P99 / max"):
            assert wanted in text
        assert re.search(r"Worst decile .*\b(8|30) tokens\): [\d.]+ % .* [\d.]+ [mµ]?s", text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shed"], "--shed needs objectives"),
        (["--shed", "--slo-ttft-ms", "100"], "does not say that it is onbeat"),
        (["--send-slo", "headers"], "has nothing to send"),
        (["--random-long-input-len", "9"], "needs --random-long-share"),
        (["--random-long-share", "0.5", "--dataset-name", "conversation"], "for --dataset-name"),
        (["--random-long-share", "1.5"], "random_long_share"),
    ],
)
def test_objectives_and_long_prompts_that_cannot_be_had_are_refused(
    server: Background, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert bench(server, *flags) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_compare_prints_both(server: Background, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, concurrency in zip(paths, "12", strict=True):
        flags = ["--num-prompts", "6", "--max-concurrency", concurrency, "--save-detailed", "--json", path]
        bench(server, *SMALL, *flags)
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "compare", *paths, "--seed=-1"])
    capsys.readouterr()

    assert main(["bench", "compare", *paths]) == 0

    out = capsys.readouterr().out
    assert "95 % interval" in out
    assert "max_concurrency" in out


def test_saved_files_get_names_and_details(server: Background, tmp_path: Path) -> None:
    flags = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--label", "mine"]

    bench(server, *SMALL, "--num-prompts", "3", "--max-concurrency", "1", "--metadata", "commit=abc", *flags)

    [path] = tmp_path.iterdir()
    assert path.name.startswith("mine-infqps-concurrency1-fake-")
    document = load(path)
    assert document["commit"] == "abc"
    assert document["generated_texts"] == [" word word word word"] * 3


def test_sampling_flags_and_key_reach_the_server(server: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    bench(
        server,
        *SMALL,
        *("--num-prompts", "1", "--backend", "openai-chat", "--top-k", "5", "--ignore-eos"),
        *("--extra-body", '{"min_tokens": 2}', "--header", "X-Team=a"),
    )

    [body] = server.fake.bodies
    assert (body["temperature"], body["top_k"], body["ignore_eos"], body["min_tokens"]) == (0.0, 5, True, 2)
    assert server.fake.headers[0]["Authorization"] == "Bearer secret"
    assert server.fake.headers[0]["X-Team"] == "a"


def test_a_header_of_ones_own_replaces_the_key(server: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    bench(server, *SMALL, "--num-prompts", "1", "--header", "authorization=Bearer own")

    headers = {name.lower(): value for name, value in server.fake.headers[0].items()}
    assert headers["authorization"] == "Bearer own"


def test_what_a_server_says_is_not_markup(
    server: Background, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fake.fail_every, server.fake.message = 2, "a prompt ends with [/INST], not with [red]"

    bench(server, *SMALL, "--num-prompts", "4", "--label", "[/x]", "--json", str(tmp_path / "r.json"))

    assert server.fake.message in capsys.readouterr().out
    assert load(tmp_path / "r.json")["failed"] == 2


def test_expired_requests_are_missing_in_a_sweep(
    server: Background, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fake.fail_every, server.fake.fault = 2, "status:504"

    assert bench(server, *SMALL, "--num-prompts", "4", "--sweep-concurrency", "1,2") == 0

    assert capsys.readouterr().out.count("2 (-2)") == 2


def test_a_gateway_without_a_server_is_a_failure(server: Background) -> None:
    server.fake.fail_every, server.fake.fault = 1, "status:504"

    assert bench(server, *SMALL, "--num-prompts", "3") == 1


def test_lengths_are_counted_by_a_server_that_calls_the_text_content(
    server: Background, tmp_path: Path
) -> None:
    server.fake.text_field = "content"

    assert bench(server, *SMALL, "--num-prompts", "2", "--json", str(tmp_path / "r.json")) == 0

    assert load(tmp_path / "r.json")["prompt_length_source"] == "server"


def test_a_server_that_counts_nothing_leaves_lengths_estimated(server: Background, tmp_path: Path) -> None:
    server.fake.text_field = "text"

    assert bench(server, *SMALL, "--num-prompts", "2", "--json", str(tmp_path / "r.json")) == 0

    assert load(tmp_path / "r.json")["prompt_length_source"] == "estimate"


def test_percentiles_of_some_metrics_make_a_report_too(server: Background, tmp_path: Path) -> None:
    flags = ["--percentile-metrics", "ttft,tpot", "--report", str(tmp_path / "r.html")]

    assert bench(server, *SMALL, "--num-prompts", "2", *flags) == 0

    assert "<!doctype html>" in (tmp_path / "r.html").read_text()


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "onbeat.cli.main", "bench", "serve", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_ctrl_c_leaves_a_partial_result(tmp_path: Path) -> None:
    path = tmp_path / "partial.json"
    fake = FakeOpenAI(first_token_delay=0.05)
    async with serving(fake) as url:
        flags = ("--num-prompts", "5000", "--max-concurrency", "2", "--json", str(path))
        process = await start("--base-url", url, *SMALL, *flags)
        await until(lambda: fake.num_completions > 6)
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), 20)

    assert process.returncode == 130, err.decode()
    assert "partial result" in out.decode()
    document = load(path)
    assert document["interrupted"] is True
    assert 0 < document["completed"] < 5000
    assert document["failed"] == 0


async def test_ctrl_c_while_waiting_for_a_server_ends_at_once() -> None:
    num_asked = 0

    async def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        process = await start("--port", str(port), "--ready-check-timeout-sec", "600")
        await until(lambda: num_asked > 1)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        server.close()

    assert process.returncode == 130
    assert "interrupted" in err.decode()
