from __future__ import annotations

import pytest

from onbeat.core.errors import MissingExtra
from onbeat.core.extras import require


def test_a_library_that_is_there_is_returned() -> None:
    assert require("json", extra="plan", purpose="this").loads("1") == 1


def test_one_that_is_not_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(MissingExtra, match=r"'no_such_library'.*'onbeat\[plan\]'"):
        require("no_such_library.part", extra="plan", purpose="fitting")
