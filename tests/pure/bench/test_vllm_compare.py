"""The page of a comparison with vLLM: which budget counts as its best, and what is said of the ratios."""

from __future__ import annotations

import re

from benchmarks.vllm.compare_page import best_of, criteria, page, ratios

NAMES = ["onbeat", "vLLM 128", "vLLM 2048"]
GOOD = {
    ("onbeat", "8"): [0.9, 0.8, 1.0],
    ("vLLM 128", "8"): [0.3, 0.4, 0.5],
    ("vLLM 2048", "8"): [0.1, 0.9, 0.2],
    ("onbeat", "16"): [0.5, 0.5, 0.5],
    ("vLLM 128", "16"): [0.0, 0.0, 0.0],
    ("vLLM 2048", "16"): [0.95, 0.95, 0.95],
}
RUNS = [
    {
        "server": server,
        "load": load,
        "round": index,
        "attainment": good,
        "output_throughput": 90.0 if server == "onbeat" else 100.0,
        **dict.fromkeys(("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms"), 50.0),
        "cpu": {"others": 0.01},
    }
    for (server, load), values in GOOD.items()
    for index, good in enumerate(values)
]
BEST = {"8": "vLLM 128", "16": "vLLM 2048"}


def test_the_best_budget_is_that_of_each_load_by_the_median_of_its_rounds():
    assert {load: best_of(RUNS, NAMES, load) for load in BEST} == BEST


def test_ratios_are_taken_within_a_round_and_none_divides_by_zero():
    assert ratios(RUNS, "onbeat", "vLLM 128", "8", "attainment") == [0.9 / 0.3, 0.8 / 0.4, 1.0 / 0.5]
    assert ratios(RUNS, "onbeat", "vLLM 128", "16", "attainment") == [50.0] * 3


def test_what_is_worse_is_said():
    fewer, gain, output = criteria(RUNS, BEST, "onbeat")
    assert re.fullmatch(r"onbeat .*fewer .* 16\.", fewer)
    assert re.search(r"2\.00 times .*concurrency 8\)", gain)
    assert "0.90 times" in output


def test_the_page_names_no_folder():
    servers = {name: {"command": "/home/me/vllm serve /models/m --port {port}"} for name in NAMES}
    text = page(
        {
            "at": "2026-11-27",
            "commit": "abc",
            "machine": "a machine",
            "command": "python -m benchmarks.vllm.compare",
            "objectives": {"8": 50.0, "16": 80.0},
            "ttft_ms": 1000.0,
            "servers": servers,
            "runs": RUNS,
        }
    )
    assert "| 8 | 50 | vLLM 128 | 0.40 (0.30 to 0.50) | 0.90 (0.80 to 1.00) |" in text
    assert "/home" not in text
    assert "/models" not in text
