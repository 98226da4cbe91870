"""Values of declared types: what is refused, and how the place of a fault is told."""

from __future__ import annotations

import dataclasses
from math import inf, nan
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from msgspec import Meta, field

from onbeat.core.errors import ConfigError
from onbeat.files import read, read_lines
from onbeat.typed import Count, Hash, NotJSON, Number, Positive, Size, Table, convert, decode, revive


class Pair(NamedTuple):
    size: Count
    name: str = ""


class Inner(Table):
    sizes: dict[str, Positive] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    width: int = 1
    rate: float = 0.0
    key: bytes = b""

    def __post_init__(self) -> None:
        if self.width > 9:
            raise ConfigError(f"width is {self.width}; at most 9")


class Top(Table):
    count: Count
    number: Number = 0.0
    mode: Literal["fast", "slow"] = "fast"
    inner: Inner = field(default_factory=Inner)
    plain: Plain | None = None
    by_number: dict[int, Size] = field(default_factory=dict)
    own: Annotated[int, Meta(ge=2, description="a count of wheels")] = 2
    digest: Hash | None = None


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"count": True}, "F: count is True; it must be a whole number of at least 0"),
        ({"count": 1.0}, "F: count is 1.0; it must be a whole number of at least 0"),
        ({"count": 10**30}, "F: count is 10"),
        ({"count": 1, "number": "x"}, "F: number is 'x'; it must be a number"),
        ({"count": 1, "number": inf}, "F: number is inf; it must be a number"),
        ({"count": 1, "number": nan}, "F: number is nan; it must be a number"),
        ({"count": 1, "mode": "slo"}, "F: mode is 'slo'; it must be one of fast, slow"),
        (
            {"count": 1, "cuont": 1},
            "F has an unknown field 'cuont': did you mean count? known are count, number",
        ),
        ({"count": 1, "own": 1}, "F: own is 1; it must be a count of wheels"),
        ({"count": 1, "digest": "0g"}, "F: digest is '0g': "),
        ({"count": 1, "by_number": {"1": 0}}, "F: by_number.1 is 0; it must be a whole number of at least 1"),
        ({"count": 1, "by_number": {"x": 1}}, "F: by_number has the key 'x'; it must be a whole number"),
        (
            {"count": 1, "inner": {"sizes": {"a": 1, "b": -2}}},
            "F: inner.sizes.b is -2; it must be a number above 0",
        ),
        (
            {"count": 1, "inner": {"pairs": [[1], [2, "x"], ["y"]]}},
            "F: inner.pairs[2][0] is 'y'; it must be a whole",
        ),
        (
            {"count": 1, "inner": {"pairs": [[1, "a", 3]]}},
            "F: inner.pairs[0] is [1, 'a', 3]; it must be a list of 2",
        ),
        ({"count": 1, "inner": [1]}, "F: inner is [1]; it must be a mapping with sizes, pairs"),
        (
            {"count": 1, "plain": {"hight": 1}},
            "F: plain has an unknown field 'hight': known are width, rate, key",
        ),
        ({"count": 1, "plain": {"width": 10}}, "F: width is 10; at most 9"),
        ({"number": 1}, "F lacks count"),
        ([], "F: it is []; it must be a mapping with count"),
    ],
)
def test_a_fault_is_told_with_its_place_and_what_the_value_must_be(content: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(Top, content, "F", hint="; mend it")
    assert str(caught.value).startswith(told)
    assert str(caught.value).endswith("; mend it")


def test_json_is_read_as_plain_values_are(tmp_path: Path) -> None:
    text = '{"count": 3, "number": 2, "by_number": {"4": 5}, "digest": "00ff", "plain": {"width": 2}}'
    found = decode(Top, text, "F")
    assert found == Top(count=3, number=2.0, by_number={4: 5}, digest=Hash(b"\x00\xff"), plain=Plain(width=2))
    for name in ("a.json", "a.yaml", "a"):
        (tmp_path / name).write_text(text)
        assert read(Top, tmp_path / name) == found
    (tmp_path / "b.yaml").write_text("count: 1\nnumber: 1e-5")  # no point: a text in YAML 1.1
    assert read(Top, tmp_path / "b.yaml").number == 1e-5
    with pytest.raises(ConfigError, match=r"number .*inf"):
        decode(Top, '{"count": 1, "number": 1e400}', "F")
    with pytest.raises(ConfigError, match="field 'x'"):
        decode(Top, '{"count": 1, "plain": {"x": 1}}', "F")
    for bad in ("{", "", '{"count": NaN}', "\ud800"):
        with pytest.raises(NotJSON):
            decode(Top, bad, "F")


def test_lines_come_with_their_numbers_and_a_cut_one_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"count": 1}\n\n{"count": 2}\n{"cou')
    assert [(n, each.count) for n, each in read_lines(Top, path, may_be_cut=True)] == [(1, 1), (3, 2)]
    with pytest.raises(NotJSON, match="line 4"):
        list(read_lines(Top, path))
    path.write_text('{"count": 1}\n{"count": -2}\n')
    with pytest.raises(ConfigError, match=r"2.*-2.*0"):
        list(read_lines(Top, path))


def test_a_type_without_bounds_is_revived_from_what_json_lacks() -> None:
    assert revive(Plain, {"rate": "inf", "key": "0a"}, "F") == Plain(rate=inf, key=b"\n")
    for wrong in ({"width": 10**18}, {"rate": -1e18}, {"rate": "1"}, {"width": "inf"}):
        with pytest.raises(ConfigError):
            revive(Plain, wrong, "F")
