"""Settings that are declared once: their flags, their keys in files, their checks, their documentation."""

from __future__ import annotations

import argparse
import math
import runpy
from dataclasses import MISSING, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from onbeat.bench.bench_config import BenchConfig
from onbeat.cli.args import Parser, parse
from onbeat.cli.options import add_options, read_options
from onbeat.cli.replay import ReplayOptions
from onbeat.core.errors import ConfigError
from onbeat.core.options import Setting, change, check, make, option, part, settings_of
from onbeat.core.slo import SLO, ShedMode
from onbeat.engine.engine_config import EngineConfig
from onbeat.metrics.summary import SummaryOptions
from onbeat.scheduler.scheduler_config import SchedulerLimits
from onbeat.server.server_config import ServerConfig
from onbeat.server.slo_defaults import SLODefaults
from onbeat.simulator.deployment import Deployment
from onbeat.workload.load import Load
from tests.pure.cli.test_args import sub_parser

ROOT = Path(__file__).parents[3]
DECLARED = {
    ("serve",): (EngineConfig, ServerConfig, SLODefaults, SLO),
    ("simulate",): (Deployment, Load, SummaryOptions),
    ("capacity",): (Deployment, Load),
    ("bench", "serve"): (BenchConfig, SummaryOptions),
    ("replay",): (ReplayOptions,),
}
NEEDED: dict[tuple[str, ...], list[str]] = {
    command: ["--model", "some", "--device", "cpu"] for command in (("simulate",), ("capacity",))
}
ALL_DECLARED = [(command, kind) for command, kinds in DECLARED.items() for kind in kinds]


parser_of = cache(sub_parser)


def actions(*command: str) -> dict[str, argparse.Action]:
    options = parser_of(*command)._option_string_actions
    return {
        flag: action
        for flag, action in options.items()
        if flag.startswith("--") and action.help != argparse.SUPPRESS
    }


READ_AT_ONCE = ("speculative_config", "lora_modules", "fleet_changes", "disaggregate", "kinds")
"""Keys whose values are something else once they are read."""


EXAMPLES = {
    "lora_modules": ["sql=./sql"],
    "speculative": {"method": "ngram"},
    "override_generation_config": {"temperature": 0.5},
    "device": "cpu",
    "engine": "vllm@0.6",
    "disaggregate": "prefill=1,decode=2",
    "autoscale": "0..4",
    "fleet_changes": ["30 kill 0", "90 scale 4"],
    "kinds": ["device=h100-sxm,tp=2", "policy=sarathi,replicas=3"],
}


def example(setting: Setting) -> Any:
    """Return a value that a file may give the setting, other than its default as a rule."""
    if setting.choices:
        return setting.choices[-1]
    if setting.kinds == (bool,):
        return not setting.default
    if setting.name in EXAMPLES:
        return EXAMPLES[setting.name]
    if setting.name == "step_time" and setting.option.parse is not None:
        return "fitted"
    kind = setting.kinds[0]
    if kind in (int, float):
        return 32
    return "some" if kind in (str, Path) else ["some", "more"]


def is_flag(setting: Setting) -> bool:
    """A table with one entry offers nothing to choose: its setting has no flag."""
    assert setting.is_open or len(setting.choices) == 1
    return setting.is_open


def test_the_table_of_all_flags_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts/flags"))["page"]()
    assert page + "\n" == (ROOT / "docs/flags.md").read_text(), "run `make flags`"


def test_what_serve_and_simulate_share_has_the_same_default() -> None:
    serve, simulate = actions("serve"), actions("simulate")
    differ = {
        flag
        for flag in serve.keys() & simulate.keys()
        if not simulate[flag].required and serve[flag].default != simulate[flag].default
    }
    assert differ == {"--dtype"}  # a virtual device has no type of its own that `auto` could mean
    assert make(EngineConfig, model=None).limits == make(Deployment, model="m", device="d").limits
    assert SLODefaults().shed == make(Deployment, model="m", device="d").shed == ShedMode.RELEGATE
    assert SLODefaults().mode == SummaryOptions().slo_mode == SchedulerLimits().slo_mode


@pytest.mark.parametrize(("command", "kind"), ALL_DECLARED)
def test_every_setting_is_a_flag_with_its_help(command: tuple[str, ...], kind: type[Any]) -> None:
    parser = parser_of(*command)
    shown = " ".join(parser.format_help().split())
    for setting in filter(is_flag, settings_of(kind)):
        action = parser._option_string_actions[setting.flag]
        assert action.help
        assert setting.flag in shown


@pytest.mark.parametrize(("command", "kind"), ALL_DECLARED)
def test_every_setting_is_a_key_of_a_file(command: tuple[str, ...], kind: type[Any], tmp_path: Path) -> None:
    if "--config" not in actions(*command):
        pytest.skip("the command reads no file")
    given = {setting.key: example(setting) for setting in filter(is_flag, settings_of(kind))}
    path = tmp_path / "flags.yaml"
    path.write_text(yaml.safe_dump(given))
    args = vars(parse(parser_of(*command), ["--config", str(path), *NEEDED.get(command, [])]))
    for key, value in given.items():
        assert args[key] == value or str(args[key]) == value or key in READ_AT_ONCE, key


@dataclass(frozen=True, slots=True, kw_only=True)
class Innermost:
    depth: int = option(1, group="inner", help="how deep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int = option(4, group="inner", at_least=1, help="how large")
    kind: Literal["plain", "odd"] = option("plain", group="inner", help="which")
    below: Innermost = part(Innermost)

    def __post_init__(self) -> None:
        check(self, Inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str = option(group="outer", help="whose 100% it is")
    inner: Inner = part(Inner)
    wait: float | None = option(None, group="outer", flag="--wait-ms", unit="ms", help="how long")
    cap: int | Literal["auto"] | None = option(None, group="outer", help="at most")
    mode: ShedMode = option(ShedMode.OFF, group="outer", help="what then")
    tags: tuple[str, ...] = option((), group="outer", help="marks")
    notes: tuple[str, ...] = option((), many="append", group="outer", help="one of several")
    links: tuple[str, ...] = option((), many="*", group="outer", help="or none")
    quiet: bool = option(default=False, is_switch=True, group="outer", help="say nothing")
    other: int = 7


def outer(*flags: str) -> Outer:
    parser = Parser(prog="onbeat test")
    add_options(parser, Outer)
    assert parser.format_help()
    return read_options(parse(parser, flags), Outer)


def test_settings_are_read_back_as_they_are_inside() -> None:
    assert outer("--name", "n") == Outer(name="n")
    given = outer(
        *("--name=n", "--size=2k", "--kind", "odd", "--wait-ms", "35", "--cap", "auto"),
        *("--mode", "reject", "--tags", "a", "b", "--notes", "a", "--notes=b", "--links", "--quiet"),
    )
    inner = Inner(size=2000, kind="odd")
    assert given == Outer(
        name="n",
        inner=inner,
        wait=0.035,
        cap="auto",
        mode=ShedMode.REJECT,
        tags=("a", "b"),
        notes=("a", "b"),
        quiet=True,
    )
    assert type(given.mode) is ShedMode
    assert outer("--name=n", "--cap", "8k").cap == 8000


def test_a_switch_has_no_form_that_turns_it_off(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        outer("--name", "n", "--no-quiet")
    assert "unknown flag --no-quiet" in capsys.readouterr().err


def test_settings_of_parts_go_by_their_own_names() -> None:
    made = make(Outer, name="n", size=3, other=1)
    assert made == Outer(name="n", inner=Inner(size=3), other=1)
    assert change(made, depth=9).inner == Inner(size=3, below=Innermost(depth=9))
    assert make(Outer, name="n", depth=9) == Outer(name="n", inner=Inner(below=Innermost(depth=9)))
    assert change(made, kind="odd", name="m") == Outer(name="m", inner=Inner(size=3, kind="odd"), other=1)
    assert [each.name for each in settings_of(Outer)][:3] == ["name", "size", "kind"]
    assert settings_of(Outer)[0].default is MISSING


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"siz": 3}, r"'siz'; .* size"),
        ({"size": 0}, "size is 0;"),
        ({"kind": "old"}, "kind 'old';"),
    ],
)
def test_what_a_setting_may_not_be_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(Outer, name="n", **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"wait": 0.0}, "wait_ms is 0.0;"),
        ({"wait": math.inf}, "wait_ms is inf;"),
        ({"wait": math.nan}, "wait_ms is nan"),
        ({"share": 1.5}, "share is 1.5;"),
        ({"shares": (0.5, -1.0)}, "shares is -1.0;"),
    ],
)
def test_a_value_outside_of_its_bounds_is_refused(values: dict[str, Any], message: str) -> None:
    settings = partial(option, group="bounds", help="of a value")

    @dataclass(frozen=True, kw_only=True)
    class Bounded:
        wait: float = settings(0.1, flag="--wait-ms", unit="ms", above=0, below=math.inf)
        share: float = settings(0.5, at_least=0, at_most=1)
        shares: tuple[float, ...] = settings((), at_least=0)

    check(Bounded(), Bounded)
    with pytest.raises(ConfigError, match=message):
        check(Bounded(**values), Bounded)


def test_a_list_may_be_one_word_with_commas(capsys: pytest.CaptureFixture[str]) -> None:
    read = partial(parse, parser_of())
    args = read(["bench", "serve", "--metric-percentiles", "50, 99.9", "--sweep-concurrency=1,4"])
    options = read_options(args, BenchConfig)
    assert options.output.metric_percentiles == (50.0, 99.9)
    assert options.output.percentile_metrics == ("ttft", "tpot", "itl", "e2el")
    assert (options.load.sweep_concurrency, options.load.sweep_rate) == ((1, 4), ())
    with pytest.raises(SystemExit):
        read(["bench", "serve", "--metric-percentiles", "99,x"])
    assert "--metric-percentiles" in capsys.readouterr().err
