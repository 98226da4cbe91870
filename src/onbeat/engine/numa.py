"""Which memory nodes a machine has, and what to do where a process may run on the cores of several."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

ROOT = Path("/sys/devices/system/node")


def node_cores(cores: Set[int], root: Path = ROOT) -> list[frozenset[int]]:
    """Return the cores of each memory node among some cores; nodes without any are left out.

    A process that is limited to one entry (`os.sched_setaffinity`) before it loads a model computes with
    that node's cores alone, and has its memory there: the system gives memory of the node whose core writes
    to it first.

    Parameters
    ----------
    cores : what a process may run on.
    root : where the system lists its nodes.

    Returns
    -------
    Sets of cores in the order of the nodes; all cores as one node where the system lists none.
    """
    folders = sorted(root.glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node")))
    nodes = [frozenset(_listed(folder / "cpulist")) & cores for folder in folders]
    found = [node for node in nodes if node]
    return found if frozenset().union(*found) == cores else [frozenset(cores)]


def advice(cores: Set[int], num_threads: int, root: Path = ROOT) -> str | None:
    """Return what to say to a process that may run on the cores of several nodes; None where all is well.

    One whose threads fit into a node is told, too: the system may put them anywhere.

    Parameters
    ----------
    cores, root : as in `node_cores`.
    num_threads : that the process computes with.
    """
    num_nodes = len(node_cores(cores, root))
    if num_nodes == 1 or num_threads == 1:
        return None
    return (
        f"{num_threads} threads on {num_nodes} NUMA nodes: weights are read over the link between them; run "
        f"--replicas {num_nodes} with each on a node, or bind to one with numactl --cpunodebind 0 --membind 0"
    )


def _listed(file: Path) -> Iterator[int]:
    """Yield the numbers of a list such as `0-3,8`; nothing where there is no such file."""
    try:
        parts = file.read_text().strip().split(",")
    except OSError:
        return
    for part in filter(None, parts):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
