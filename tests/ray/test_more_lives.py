"""More of the lives of replicas that Ray placed; each start of an actor takes seconds."""

from __future__ import annotations

import pytest

from tests.fleet.test_death import (  # noqa: F401 -- run here too
    test_a_stopped_replica_is_given_up_and_does_not_come_back,
    test_no_process_is_left,
    test_the_only_replica_comes_back_and_its_streams_go_on,
)
from tests.fleet.test_moves import (  # noqa: F401 -- likewise
    test_a_replica_that_drains_moves_what_runs_there,
)
from tests.fleet.test_restarts import (  # noqa: F401 -- likewise
    test_a_fleet_grows_and_shrinks,
    test_a_replica_that_is_told_to_end_drains_and_comes_back,
    test_all_are_started_again_one_after_another_without_an_error,
    test_what_does_not_end_in_time_moves,
)

pytestmark = [pytest.mark.usefixtures("on_ray"), pytest.mark.slow]
