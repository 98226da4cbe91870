"""Prices and power of GPUs: the package's, and a user's that win."""

from __future__ import annotations

from pathlib import Path

import pytest

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.device_spec import device_ids
from onbeat.planner.prices import Prices, _table


def test_every_price_has_a_source_and_a_date() -> None:
    for device, price in _table().items():
        assert device in device_ids()
        assert price.source
        assert price.date
    assert Prices().of("h100-sxm").watts == 700


def test_a_file_wins_device_by_device(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("h100-sxm: 2.5\nl40s: {usd_per_hour: 1.1, watts: 300, date: 2026-11, source: us}\n")
    prices = Prices(path)
    assert prices.of("h100-sxm").usd_per_hour == 2.5
    assert str(path) in prices.of("h100-sxm").text
    assert prices.of("l40s").watts == 300
    assert prices.of("l4").usd_per_hour == 0.70


def test_a_file_may_name_a_device_as_its_driver_does(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("L4: 0.5\nNVIDIA H100 80GB HBM3: 2.5\n")
    assert (Prices(path).of("l4").usd_per_hour, Prices(path).of("h100-sxm").usd_per_hour) == (0.5, 2.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100: 2.5\n", "mean h100"),
        ("l4: free\n", "l4 is 'free'"),
        ("l4: 0\n", "above 0"),
        ("l4: {usd: 3}\n", "usd_per_hour"),
        ("l4: {usd_per_hour: 3, watts: 0}\n", "l4.watts is 0"),
        ("l4: {usd_per_hour: 3, wats: 2}\n", "field 'wats'"),
        ("l4: {usd_per_hour: cheap}\n", "l4.usd_per_hour is 'cheap'"),
        ("- l4\n", "must be a mapping"),
        ("l4: [\n", "cannot read"),
    ],
)
def test_says_what_is_wrong_with_a_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        Prices(path)
    assert str(path) in str(caught.value)


def test_a_price_that_nobody_said_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"l40s.*--prices"):
        Prices().of("l40s")
