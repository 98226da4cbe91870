from __future__ import annotations

import pytest

from onbeat.report.units import against, duration, percent, rate_text, short, significant


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (7, "7"),
        (1.234, "1.23"),
        (9.996, "10.0"),
        (12.34, "12.3"),
        (99.96, "100"),
        (12345.6, "12,346"),
    ],
)
def test_short(value: float | None, text: str) -> None:
    assert short(value) == text


def test_one_request_a_second_is_one() -> None:
    shown = [rate_text(each) for each in (1, 0.9999, 1.01, 12_345.6)]
    assert shown == ["1 request/s", "1 request/s", "1.01 requests/s", "12,346 requests/s"]


def test_significant() -> None:
    shown = [significant(each, 4) for each in (0.9613, 16.692, 9999.4, 98412.3, 1e300)]
    assert shown == ["0.9613", "16.69", "9999", "98,412", "1e+300"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *(
            (None, "-"),
            (0.0, "0 s"),
            (0.00012, "120 µs"),
            (0.0123, "12.3 ms"),
            (0.9994, "999 ms"),
            (0.9999, "1.00 s"),
        ),
        *((2.5, "2.50 s"), (119.0, "119 s"), (150.0, "2.50 min"), (9000.0, "2.50 h")),
    ],
)
def test_durations_have_the_unit_that_suits_them(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "objective", "text"),
    [
        (0.41, 0.5, "410 ≤ 500 ms"),
        (1.4, 0.5, "1,400 > 500 ms"),
        (0.41, 2.0, "0.41 ≤ 2 s"),
        (None, 0.05, "≤ 50 ms"),
        (0.41, None, "410 ms"),
        (None, None, "-"),
    ],
)
def test_a_latency_beside_its_objective(value, objective, text: str) -> None:
    assert against(value, objective) == text


def test_shares_are_in_percent() -> None:
    assert (percent(0.982), percent(1.0), percent(None)) == ("98.2 %", "100 %", "-")
