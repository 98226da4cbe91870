"""Memory nodes, from a made-up list of the system's."""

from __future__ import annotations

from pathlib import Path

import pytest

from onbeat.engine.container import node_cores, numa_advice
from tests.told import numbers


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two nodes of eight threads each, as a machine with SMT numbers them, and one of memory alone."""
    for name, cores in (("node0", "0-3,8-11\n"), ("node1", "4-7,12-15\n"), ("node2", "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores)
    (tmp_path / "possible").write_text("0-2\n")
    return tmp_path


ALL = frozenset(range(16))
FIRST, SECOND = frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15})


def test_cores_are_told_apart_by_node(two_sockets: Path) -> None:
    assert node_cores(ALL, two_sockets) == [FIRST, SECOND]
    assert node_cores(frozenset({1, 5, 13}), two_sockets) == [frozenset({1}), frozenset({5, 13})]
    assert node_cores(SECOND, two_sockets) == [SECOND]


def test_nodes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for node in range(12):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{node}")
    assert node_cores(frozenset(range(12)), tmp_path) == [frozenset({core}) for core in range(12)]


def test_a_system_that_lists_no_nodes_has_one(tmp_path: Path, two_sockets: Path) -> None:
    assert node_cores(ALL, tmp_path / "absent") == [ALL]
    assert node_cores(ALL | {99}, two_sockets) == [ALL | {99}], "a core of no node: the list cannot be right"


def test_threads_on_several_nodes_are_told_what_to_do(two_sockets: Path) -> None:
    said = numa_advice(ALL, 16, two_sockets)
    assert said is not None
    assert numbers(said)[:2] == [16, 2]
    assert "--replicas 2" in said
    assert "numactl" in said


def test_more_threads_than_cores_are_told_what_to_do(two_sockets: Path) -> None:
    said = numa_advice(FIRST, 500, two_sockets)
    assert said is not None
    assert numbers(said) == [500, len(FIRST)]
    assert "--threads" in said


@pytest.mark.parametrize(("cores", "num_threads"), [(FIRST, 8), (SECOND, 8), (ALL, 1)])
def test_what_stays_on_a_node_is_told_nothing(
    two_sockets: Path, cores: frozenset[int], num_threads: int
) -> None:
    assert numa_advice(cores, num_threads, two_sockets) is None
