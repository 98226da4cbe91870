"""The flags of simulated loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from onbeat.cli.args import Parser, parse
from onbeat.cli.options import add_options, read_options
from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, SLO_CLASSES
from onbeat.workload.load import Load, tightest_tbt
from onbeat.workload.offered import OfferedLoad, Overlong
from onbeat.workload.slo_classes import SLOClass
from tests.many_cases import each_case

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02}.5,{100 + second},5\n" for second in range(10)
)


def options_of(*flags: str) -> Load:
    parser = Parser(prog="onbeat simulate")
    add_options(parser, Load)
    return read_options(parse(parser, flags), Load)


def load_of(*flags: str, max_model_len: int = 4096, overlong: Overlong = "error") -> OfferedLoad:
    return options_of(*flags).offered(max_model_len=max_model_len, overlong=overlong)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return str(path)


def test_defaults_are_a_thousand_requests_at_one_a_second() -> None:
    load = load_of()

    assert (load.name, len(load), load.rate, load.classes) == ("random", 1000, 1.0, ())


def test_a_concurrency_alone_is_a_closed_loop(trace: str) -> None:
    assert load_of("--max-concurrency", "4").arrivals is None
    assert load_of("--max-concurrency", "4", "--trace", trace).arrivals is None
    assert load_of("--max-concurrency", "4", "--request-rate", "2").rate == 2.0
    assert load_of("--max-concurrency", "4", "--trace", trace, "--arrivals", "replay").arrivals is not None


def test_a_trace_is_replayed_unless_a_rate_is_given(trace: str) -> None:
    replayed = load_of("--trace", trace, "--rate-scale", "2")
    redrawn = load_of("--trace", trace, "--request-rate", "5", "--num-prompts", "1k")

    assert replayed.arrivals is not None
    assert replayed.arrivals.tolist() == pytest.approx([second / 2 for second in range(10)])
    assert len(redrawn) == 1000
    assert redrawn.rate == pytest.approx(5.0)
    assert set(redrawn.num_prompt_tokens.tolist()) == set(range(100, 110))


def test_other_arrivals() -> None:
    assert load_of("--request-rate", "inf").rate == float("inf")
    assert load_of("--rate-steps", "1:10,3:10").rate == pytest.approx(2.0, rel=0.2)


def test_objectives_of_flags_are_one_class() -> None:
    flags = ("--slo-ttft-ms", "500", "--slo-tbt-ms", "50")
    load = load_of(*flags)

    assert load.slo(7) == SLO(ttft=0.5, tbt=0.05)
    assert load.classes == (SLOClass(name="default", slo=SLO(ttft=0.5, tbt=0.05)),)
    assert tightest_tbt(options_of(*flags).classes()) == pytest.approx(0.05)
    assert tightest_tbt(options_of("--slo-ttft-ms", "5").classes()) is None


def test_objectives_by_class(tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text("classes: [{name: interactive, share: 0.25}, {name: x, tbt_ms: 20, share: 0.75}]")
    load = load_of("--slo-config", str(path), "--num-prompts", "8")

    assert [load.slo(i) for i in range(8)].count(SLO_CLASSES["interactive"]) == 2
    assert tightest_tbt(options_of("--slo-config", str(path)).classes()) == pytest.approx(0.02)
    assert load_of("--slo-config", "batch").slo(0) == SLO_CLASSES["batch"]


def test_overlong_requests_are_counted_or_left_out(trace: str) -> None:
    with pytest.raises(ConfigError, match=r"3.*10.*9.*107.*5.*--overlong"):
        load_of("--trace", trace, max_model_len=111)
    fitted = load_of("--trace", trace, overlong="skip", max_model_len=111)
    assert (len(fitted), fitted.num_skipped) == (7, 3)


@each_case(
    ("flags", "message"),
    [
        (("--num-prompts", "0"), "--num-prompts"),
        (("--input-len", "0"), "at least 1"),
        (("--output-len", "0"), "output_len is 0"),
        (("--request-rate", "0"), "request_rate is 0"),
        (("--request-rate", "nan"), "request_rate is nan"),
        (("--rate-steps", "2:a"), "RATE:SECONDS"),
        (("--rate-scale", "2"), "--rate-scale"),
        (("--max-concurrency", "4", "--rate-scale", "2"), "closed loop"),
        (("--max-concurrency", "4", "--burstiness", "0.2"), "--burstiness"),
        (("--dataset-name", "conversation", "--random-range-ratio", "0.5"), "--random-range-ratio"),
        (("--random-range-ratio", "1.5"), "random_range_ratio is 1.5"),
        (("--disable-shuffle",), "--disable-shuffle"),
        (("--tokenizer", "x"), "--tokenizer is for"),
        (("--dataset-name", "azure"), "--dataset-path"),
        (("--trace", "none.csv"), "none.csv"),
        (("--trace", "x", "--dataset-name", "azure"), "leave out --dataset-name"),
        (("--dataset-name", "lengths", "--dataset-path", "x", "--length-columns", "a"), "takes two"),
        (("--slo-ttft-ms", "0"), "1 ms"),
        (("--slo-config", "batch", "--slo-tbt-ms", "5"), "leave out --slo-tbt-ms"),
        (("--slo-config", "interactiv"), "interactiv"),
    ],
)
def test_bad_flags_name_the_cure(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_of(*flags)
