"""What the machine and its control groups leave to this process: memory and processors.

Linux has two versions of them, and a machine may use both. A group's limit holds for the groups inside it,
so on the way from the process's own group to the outermost the strictest counts.

A machine may have several memory nodes, which matters where a process may run on the cores of more than one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class FreeMemory(NamedTuple):
    """How much memory can be taken now."""

    num_bytes: int
    limit: str
    """What sets this limit, for people."""
    num_shares: int = 1
    """Replicas that have as much each."""

    def replicas_that_fit(self, num_bytes: int) -> str:
        """Return how many replicas would fit that need so much each, as the end of a message."""
        if self.num_shares == 1:
            return ""
        fitting = self.num_bytes * self.num_shares // num_bytes
        cure = f"; use --replicas {fitting}, or" if fitting else "; use"
        return f". Of {self.num_shares} replicas {fitting} would fit{cure} a smaller --kv-cache-memory-bytes"


def host_memory() -> FreeMemory:
    """Return how much memory of this machine, or of its container, is free now."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            machine = int(line.split()[1]) * 1024
    found = [FreeMemory(machine, "this machine")]
    if (in_container := memory_left()) is not None:
        found.append(FreeMemory(in_container, "the memory limit of this container"))
    return min(found)


def usable_cores() -> int:
    """Return the cores that this process may run on, and no more than whole ones that its container has."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return cores if quota is None else max(min(cores, int(quota)), 1)


def private_bytes(process_id: int | None) -> int:
    """Return the memory that a process and its children have for themselves; 0 where there is none.

    Pages of files, such as weights that are mapped, are not counted: all processes share these.
    """
    status = Path(f"/proc/{process_id}/status")
    own = [
        line.split() for line in read_text(status).splitlines() if line.startswith(("RssAnon:", "RssShmem:"))
    ]
    children = read_text(Path(f"/proc/{process_id}/task/{process_id}/children")).split()
    return sum(int(words[1]) * 1024 for words in own) + sum(private_bytes(int(child)) for child in children)


def memory_left(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Return how many bytes may still be taken, or None where no group has a limit.

    Pages of files that nobody has read of late count as free: the system drops them when memory is short.
    """
    left = []
    for group in _groups("memory", root, membership):
        for limit_file, usage_file, cached_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _number(group / limit_file), _number(group / usage_file)
            if limit is not None and usage is not None:
                cached = _entries(group / "memory.stat").get(cached_name, 0)
                left.append(max(limit - max(usage - cached, 0), 0))
    return min(left, default=None)


def cpu_quota(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Return how many processors' time this process may use, or None where no group has a quota."""
    quotas = []
    for group in _groups("cpu", root, membership):
        words = read_text(group / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota is not None and period:  # a quota of -1 is none, and no number here
            quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of the process's groups of either version, from its own to the outermost."""
    for line in read_text(membership).splitlines() or ["0::/", f"1:{controller}:/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        # A container may see the path of its group as the host has it, or as one outside its own root.
        group = base if ".." in path else base / path.strip("/")
        while group != base:
            yield group
            group = group.parent
        yield base


def _number(file: Path) -> int | None:
    text = read_text(file).strip()
    return int(text) if text.isdigit() else None


def _entries(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in read_text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def read_text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


NODES = Path("/sys/devices/system/node")


def node_cores(cores: Set[int], root: Path = NODES) -> list[frozenset[int]]:
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


def numa_advice(cores: Set[int], num_threads: int, root: Path = NODES) -> str | None:
    """Return what to say to a process on the cores of several nodes, or on too few; None where all is well.

    One whose threads fit into a node is told, too: the system may put them anywhere.

    Parameters
    ----------
    cores, root : as in `node_cores`.
    num_threads : that the process computes with.
    """
    if num_threads > len(cores):
        return f"{num_threads} threads wait for each other on {len(cores)} cores; leave --threads out"
    num_nodes = len(node_cores(cores, root))
    if num_nodes == 1 or num_threads == 1:
        return None
    return (
        f"{num_threads} threads on {num_nodes} NUMA nodes: weights are read over the link between them; run "
        f"--replicas {num_nodes} with each on a node, or bind to one with numactl --cpunodebind 0 --membind 0"
    )


def _listed(file: Path) -> Iterator[int]:
    """Yield the numbers of a list such as `0-3,8`; nothing where there is no such file."""
    for part in filter(None, read_text(file).strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
