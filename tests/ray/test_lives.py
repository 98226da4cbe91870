"""Replicas that Ray placed live and die as those of this machine do: the same tests, on both."""

from __future__ import annotations

import pytest

from tests.fleet.test_death import (  # noqa: F401 -- run here too
    test_streams_of_a_killed_replica_go_on_at_once_and_it_comes_back,
)

pytestmark = pytest.mark.usefixtures("on_ray")
