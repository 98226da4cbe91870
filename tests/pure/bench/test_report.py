from __future__ import annotations

import base64
import gzip
import re
from array import array
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from onbeat.bench.bench_load import BenchLoad
from onbeat.bench.result import BenchRun
from onbeat.core.slo import SLO
from onbeat.metrics.summary import LatencyStatistic
from onbeat.report import charts
from onbeat.report.plot import log_scale
from onbeat.report.result import write_page
from onbeat.report.run_report import latency_columns
from tests.pure.bench.results import failure, make_records, make_result, result_of

MEAN_TPOT = LatencyStatistic("tpot", "mean")


class Page(HTMLParser):
    """What a page would load, the figures inside it, and its plain text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.figures: list[dict[str, object]] = []
        self.text = ""
        self.num_places = 0
        self._element: tuple[str, str | None] = ("", None)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._element = (tag, values.get("id"))
        self.num_places += "data-figure" in values
        self.references += [
            values[name] or "" for name in ("src", "href", "srcset", "data") if name in values
        ]

    def handle_endtag(self, tag: str) -> None:
        self._element = ("", None)

    def handle_data(self, data: str) -> None:
        tag, name = self._element
        if tag == "style":
            self.references += re.findall(r"url\(|@import", data)
        elif tag == "script" and name == "figures":
            self.figures = orjson.loads(gzip.decompress(base64.b64decode(data)))
        elif tag != "script":
            self.text += data


def page_of(tmp_path: Path, results: list[BenchRun]) -> Page:
    path = tmp_path / "report.html"
    write_page(result_of(*results), path)
    return Page(path.read_text())


def sweep() -> list[BenchRun]:
    return [
        make_result(
            make_records(20, slowdown=level), load=BenchLoad(max_concurrency=level), title=f"c={level}"
        )
        for level in (1, 4, 8)
    ]


def test_a_report_loads_nothing(tmp_path: Path) -> None:
    page = page_of(tmp_path, [make_result()])

    assert page.references == []
    assert page.num_places == len(page.figures) == 6


def test_lines_of_gaps_have_holes_where_no_token_came() -> None:
    late = make_records(40)
    for record in late[20:]:
        record.sent, record.end = record.sent + 60.0, record.end + 60.0
        record.delivery_times = array("d", [time + 60.0 for time in record.delivery_times])
    figure = charts.gaps_figure(make_result(late))
    assert figure
    for line in figure["data"][1:]:
        assert line["y"][0] is not None
        assert line["y"][len(line["y"]) // 2] is None
        assert len(line["x"]) == len(line["y"])


def test_warnings_stand_in_a_box(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(result_of(replace(make_result(), warnings=("too late",))), path)
    assert re.findall(r'<div class="(note[^"]*)"><p>(.*?)</p>', path.read_text()) == [("note", "too late")]


def test_plotly_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(result_of(*sweep()), path)
    text = path.read_text()

    [packed] = re.findall(r'id="plotly">([^<]*)<', text)
    library = gzip.decompress(base64.b64decode(packed)).decode()
    assert len(re.findall(r"\* plotly\.js \(basic - minified\) v4", library)) == 1
    assert "</script" not in library, "the page makes an element of it"
    assert "default-src 'none'" in text
    assert len(text) < 1_000_000, "a page can be mailed"


def test_a_sweep_has_its_trade_offs_and_every_run(tmp_path: Path) -> None:
    page = page_of(tmp_path, sweep())

    titles = [figure["title"] for figure in page.figures]
    assert titles[:2] == ["Share of requests within their objectives", "Goodput"]
    assert titles[2:6] == ["Mean TPOT", "P99 TBT", "Mean TTFT", "P99 TTFT"]
    assert titles.count("Timeline of requests") == 3
    assert page.num_places == len(page.figures)


def test_text_from_servers_cannot_break_the_page(tmp_path: Path) -> None:
    nasty = "</script><img src=https://example.org/x>"
    records = [*make_records(3), failure(3, detail=nasty)]
    page = page_of(tmp_path, [make_result(records, model=nasty, title=nasty)])

    assert page.references == []
    assert nasty in page.text


def test_a_run_without_any_answer_still_has_a_report(tmp_path: Path) -> None:
    page = page_of(tmp_path, [make_result([failure(0), failure(1)])])

    assert "Not completed" in page.text
    assert [figure["title"] for figure in page.figures] == ["Timeline of requests"]


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    assert "interrupted" in page_of(tmp_path, [make_result(interrupted=True)]).text


def test_a_run_with_objectives_shows_who_pays(tmp_path: Path) -> None:
    records = make_records(40)
    for place, record in enumerate(records):
        record.offered_prompt_tokens = 10 * place + 10
        record.tenant = "ab"[place % 2]
    records[39].sent -= 60.0  # it alone misses the 200 ms
    result = make_result(records)
    page = page_of(tmp_path, [result])

    assert page.num_places == len(page.figures) == 7
    [figure] = [each for each in page.figures if "by length of prompt" in str(each["title"])]
    bars, waits = cast(list[dict[str, Any]], figure["data"])
    assert bars["y"] == [100.0] * 9 + [75.0]
    assert bars["x"] == waits["x"]
    assert bars["x"][-1] == "370 to 400"
    assert max(waits["y"][:-1]) < 0.1
    assert 60 < waits["y"][-1] < 60.1
    assert len(set(bars["marker"]["color"][:-1])) == 1 != len(set(bars["marker"]["color"]))
    assert "Worst decile (prompts of 370 to 400 tokens): 75 % good, longest wait 60." in page.text
    assert "Objectives by tenant" in page.text
    sweep_page = page_of(tmp_path, [result, result])
    assert [each["title"] for each in sweep_page.figures].count(figure["title"]) == 2


def with_classes(slowdown: float = 1.0, load: BenchLoad | None = None) -> BenchRun:
    records = make_records(40, slowdown=slowdown)
    for place, record in enumerate(records):
        record.request_class = ("chat", "batch")[place % 2]
        record.slo = (SLO(ttft=0.1, tbt=0.05), SLO(ttft=0.5, tbt=0.05))[place % 2]
    return make_result(records, load=load, bench={"goodput": ()})


def test_the_head_names_the_objectives(tmp_path: Path) -> None:
    assert "TTFT 200 ms" in page_of(tmp_path, [make_result()]).text  # of the whole run
    said = "batch TTFT 500 ms and TBT 50 ms; chat TTFT 100 ms and TBT 50 ms (stream mode)"
    assert said in page_of(tmp_path, [with_classes()]).text
    assert said in page_of(tmp_path, [with_classes(), with_classes(2.0)]).text
    nothing = make_result(bench={"goodput": ()})
    assert "TTFT 200 ms" not in page_of(tmp_path, [nothing]).text


@pytest.mark.parametrize(
    ("metric", "names"),
    [
        ("ttft", {100.0: "chat 100 ms", 500.0: "batch 500 ms"}),
        ("itl", {50.0: "batch, chat 50 ms"}),
        ("tpot", {}),
    ],
)
def test_a_distribution_has_a_line_for_each_objective(metric: str, names: dict[float, str]) -> None:
    figure = charts.cdf_figure([with_classes()], metric, "title")
    assert figure is not None
    assert [line["x"][0] for line in figure["data"][1:]] == list(names)
    shown, axis = figure["layout"]["annotations"], figure["layout"]["xaxis"]
    assert [each["text"] for each in shown] == list(names.values())
    if axis["type"] == "log":
        assert [10 ** each["x"] for each in shown] == pytest.approx(list(names))
        assert all(axis["range"][0] < each["x"] < axis["range"][1] for each in shown)
    else:
        assert [each["x"] for each in shown] == list(names)
    of_run = charts.cdf_figure([make_result()], "ttft", "title")
    assert of_run is not None
    assert [each["text"] for each in of_run["layout"]["annotations"]] == ["objective 200 ms"]


@pytest.mark.parametrize("is_closed", [True, False])
def test_kept_requests_are_drawn_over_the_load(is_closed: bool) -> None:
    loads = [
        BenchLoad(max_concurrency=level) if is_closed else BenchLoad(request_rate=float(level))
        for level in (8, 1, 4)
    ]
    runs = [with_classes(slowdown, load) for slowdown, load in zip((6.0, 1.0, 3.0), loads, strict=True)]
    kept = charts.kept_figure(runs)
    good = charts.goodput_figure(runs)
    assert kept is not None
    assert good is not None
    (line, mark), (rates,) = kept["data"], good["data"]
    assert (mark["name"], mark["x"]) == ("capacity", [1.0])
    assert [each["text"] for each in kept["layout"]["annotations"]] == ["90 % of the requests"]
    assert [each["y0"] for each in kept["layout"]["shapes"]] == [90]
    assert line["x"] == rates["x"] == [1.0, 4.0, 8.0]
    shares = [run.summary.score.attainment or 0.0 for run in (runs[1], runs[2], runs[0])]
    assert line["y"] == pytest.approx([share * 100 for share in shares])
    assert line["y"][0] == 100 > line["y"][1] >= line["y"][2]
    axis = kept["layout"]["xaxis"]["title"]["text"]
    assert axis == ("requests at once" if is_closed else "requests/s")
    nothing = make_result(bench={"goodput": ()})
    assert charts.kept_figure([nothing]) is None
    assert charts.goodput_figure([nothing]) is None


def test_a_page_of_many_runs_can_still_be_mailed(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    runs = [make_result(make_records(900), title=f"run {place}") for place in range(24)]
    write_page(result_of(*runs), path)
    assert path.stat().st_size < 1_000_000


def test_each_latency_has_its_objective_as_a_named_line(tmp_path: Path) -> None:
    loads = [BenchLoad(request_rate=1.0), BenchLoad(request_rate=4.0)]
    for results in ([with_classes()], [with_classes(load=load) for load in loads]):
        for figure in page_of(tmp_path, results).figures:
            title, layout = str(figure["title"]), cast(dict[str, Any], figure["layout"])
            names = [each["text"] for each in layout.get("annotations", [])]
            if "TTFT" in title:
                assert names == ["chat 100 ms", "batch 500 ms"], title
            elif "TBT" in title:
                assert names == ["batch, chat 50 ms"], title


def test_an_objective_far_from_the_values_does_not_flatten_them() -> None:
    record = with_classes()
    figure = charts.tradeoff_figure([record], LatencyStatistic("ttft", "mean"), "TTFT")
    assert figure is not None
    assert figure["layout"]["yaxis"].get("type", "linear") == "linear"
    for each in record.records:
        each.slo = SLO(ttft=60.0)
    far = make_result(list(record.records), bench={"goodput": ()})
    figure = charts.tradeoff_figure([far], LatencyStatistic("ttft", "mean"), "TTFT")
    assert figure is not None
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert 10 ** figure["layout"]["annotations"][0]["y"] == pytest.approx(60_000)


def test_no_decile_is_marked_where_all_are_good(tmp_path: Path) -> None:
    records = make_records(40)
    for place, record in enumerate(records):
        record.offered_prompt_tokens = 10 * place + 10
    page = page_of(tmp_path, [make_result(records)])
    [figure] = [each for each in page.figures if "by length of prompt" in str(each["title"])]
    bars, _ = cast(list[dict[str, Any]], figure["data"])
    assert (set(bars["y"]), len(set(bars["marker"]["color"]))) == ({100.0}, 1)


def test_cdf_rises_to_one_hundred() -> None:
    figure = charts.cdf_figure([make_result()], "ttft", "TTFT")

    assert figure is not None
    curve = figure["data"][0]
    assert curve["y"][-1] == 100
    assert curve["x"] == sorted(curve["x"])


@pytest.mark.parametrize(("num_gpus", "title"), [(1, "output tokens/s"), (2, "output tokens/s per GPU")])
def test_throughput_is_per_gpu_where_there_are_several(num_gpus: int, title: str) -> None:
    result = make_result(bench={"num_gpus": num_gpus})
    figure = charts.tradeoff_figure([result], MEAN_TPOT, "TPOT")
    assert figure is not None
    assert figure["layout"]["xaxis"]["title"]["text"] == title


@pytest.mark.parametrize(
    ("percentiles", "columns"), [((50, 99), "mean std p50 p99 max"), ((90,), "mean median std p90 max")]
)
def test_the_median_is_shown_once(percentiles: tuple[float, ...], columns: str) -> None:
    assert [column.key for column in latency_columns(percentiles)] == ["", *columns.split()]


def test_gaps_of_a_run_of_months_are_drawn() -> None:
    records = make_records(2)
    records[1].delivery_times = array("d", [each + 3e7 for each in records[1].delivery_times])
    figure = charts.gaps_figure(make_result(records))
    assert figure is not None
    assert len(figure["data"][1]["x"]) == 2


def test_long_runs_are_thinned_but_keep_their_longest_gap() -> None:
    records = make_records(900)
    records[444].delivery_times[-1] += 5.0
    result = make_result(records)
    timeline, gaps = charts.timeline_figure(result), charts.gaps_figure(result)

    assert timeline is not None
    assert gaps is not None
    assert "300 of 900 shown" in timeline["title"]
    assert len(gaps["data"][0]["x"]) <= charts.MAX_GAP_POINTS
    assert max(gaps["data"][0]["y"]) > 5000


def test_timeline_shows_waits_streams_and_losses() -> None:
    records = [*make_records(2), failure(2)]
    records[0].scheduled = records[0].sent - 0.5
    figure = charts.timeline_figure(make_result(records, load=BenchLoad(request_rate=3.0)))

    assert figure is not None
    names = {trace["name"] for trace in figure["data"]}
    assert names == {"waiting in the client", "sent, no token yet", "streaming", "not completed"}


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (BenchLoad(max_concurrency=4), "closed loop of 4"),
        (BenchLoad(request_rate=2.0), "Poisson arrivals at 2 req/s"),
        (BenchLoad(request_rate=24.43042), "Poisson arrivals at 24.43 req/s"),
        (BenchLoad(request_rate=2.0, burstiness=0.5), "gamma arrivals at 2 req/s"),
        (BenchLoad(request_rate=2.0, max_concurrency=3), "Poisson arrivals at 2 req/s, at most 3 open"),
        (BenchLoad(arrivals="replay"), "replay"),
        (BenchLoad(), "all at once"),
    ],
)
def test_loads_in_words(load: BenchLoad, words: str) -> None:
    assert make_result(load=load).header.load == words


def test_a_limit_far_above_all_gaps_does_not_press_them_together() -> None:
    records = make_records(40)
    for place, record in enumerate(records):
        record.request_class = ("near", "far")[place % 2]
        record.slo = (SLO(tbt=0.05), SLO(tbt=60.0))[place % 2]
    figure = charts.gaps_figure(make_result(records))
    assert figure is not None
    assert [each["text"] for each in figure["layout"]["annotations"]] == ["near 50 ms"]


def test_a_wide_logarithmic_axis_has_fewer_ticks() -> None:
    narrow, wide = log_scale([10.0, 500.0]), log_scale([10.0, 50_000.0])
    assert ({20.0, 50.0} <= set(narrow["tickvals"]), 20.0 in wide["tickvals"]) == (True, False)
    assert 100.0 in wide["tickvals"]
