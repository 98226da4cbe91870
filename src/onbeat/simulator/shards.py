"""Replicas that do not affect each other: one after the other, or spread over processes."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from math import isnan, nan
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError, OnbeatError
from onbeat.core.slo import Fate
from onbeat.core.step_time import StepTimeModel
from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.cluster.events import RoutingRequest
from onbeat.scheduler.cluster.routing import Router
from onbeat.simulator.deliveries import Collector, Keep
from onbeat.simulator.fleet_loop import run_alone
from onbeat.simulator.replica import make_replica
from onbeat.simulator.result import ReplicaCounters
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.simulator.virtual_clients import Clients
from onbeat.workload.offered import OfferedLoad


@dataclass(slots=True)
class RecordColumns:
    """Records of requests that ended; what the load says of a request is left out.

    Pickling it costs a copy of its bytes; pickling the records would take longer than simulating them.
    """

    replica: str
    rows: array[int] = field(default_factory=lambda: array("q"))
    """Row of the load."""
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    scheduled: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    num_cached_tokens: array[int] = field(default_factory=lambda: array("q"))
    num_preemptions: array[int] = field(default_factory=lambda: array("q"))
    num_deliveries: array[int] = field(default_factory=lambda: array("q"))
    num_output_tokens: array[int] = field(default_factory=lambda: array("q"))
    delivery_times: array[float] = field(default_factory=lambda: array("d"))
    """Of all requests, one after the other."""
    delivery_sizes: array[int] = field(default_factory=lambda: array("I"))
    """Likewise, but of those requests alone that had a delivery of several tokens."""
    finish_reasons: list[str] = field(default_factory=list)
    predicted_ttfts: array[float] = field(default_factory=lambda: array("d"))
    predicted_waits: array[float] = field(default_factory=lambda: array("d"))
    fates: list[Fate | None] = field(default_factory=list)

    def append(self, row: int, record: RequestRecord) -> None:
        """Add the record of a request that ended."""
        assert record.finish_reason is not None
        self.rows.append(row)
        self.arrivals.append(record.arrival)
        self.scheduled.append(_or_nan(record.scheduled))
        self.ends.append(record.end)
        self.num_cached_tokens.append(record.num_cached_tokens)
        self.num_preemptions.append(record.num_preemptions)
        self.num_deliveries.append(len(record.delivery_times))
        self.num_output_tokens.append(record.num_output_tokens)
        if record.num_output_tokens != len(record.delivery_times):
            self.delivery_sizes.extend(record.delivery_sizes)
        self.delivery_times.extend(record.delivery_times)
        self.finish_reasons.append(record.finish_reason)
        self.predicted_ttfts.append(_or_nan(record.predicted_ttft))
        self.predicted_waits.append(_or_nan(record.predicted_wait))
        self.fates.append(record.fate)

    def records(self, load: OfferedLoad) -> Iterable[tuple[int, RequestRecord]]:
        """Return (row of the load, record) as they were added."""
        stop = sizes_stop = 0
        for place, row in enumerate(self.rows):
            start, stop = stop, stop + self.num_deliveries[place]
            sizes = array("B", b"\x01" * (stop - start))
            if self.num_output_tokens[place] != stop - start:
                sizes_start, sizes_stop = sizes_stop, sizes_stop + stop - start
                sizes = self.delivery_sizes[sizes_start:sizes_stop]
            request_class = load.request_class(row)
            yield (
                row,
                RequestRecord(
                    request_id=str(row),
                    arrival=self.arrivals[place],
                    num_prompt_tokens=int(load.num_prompt_tokens[row]),
                    request_class=None if request_class is None else request_class.name,
                    slo=None if request_class is None else request_class.slo,
                    tenant=load.tenant(row),
                    offered_output_tokens=int(load.num_output_tokens[row]),
                    is_embedding=not load.num_output_tokens[row],
                    replica=self.replica,
                    scheduled=_or_none(self.scheduled[place]),
                    delivery_times=self.delivery_times[start:stop],
                    delivery_sizes=sizes,
                    end=self.ends[place],
                    finish_reason=self.finish_reasons[place],
                    num_output_tokens=self.num_output_tokens[place],
                    num_cached_tokens=self.num_cached_tokens[place],
                    num_preemptions=self.num_preemptions[place],
                    predicted_ttft=_or_none(self.predicted_ttfts[place]),
                    predicted_wait=_or_none(self.predicted_waits[place]),
                    fate=self.fates[place],
                ),
            )


def _or_nan(value: float | None) -> float:
    return nan if value is None else value


def _or_none(value: float) -> float | None:
    return None if isnan(value) else value


_POLL_SECONDS = 0.02

OnProgress = Callable[[int, float], None]
"""Told how many more requests have ended, and the latest end so far (virtual seconds)."""


class IndependentReplicas:
    """A load whose requests are split among replicas before anything runs.

    Parameters
    ----------
    router : one that ignores the replicas' state.
    """

    def __init__(
        self, load: OfferedLoad, config: SimulationConfig, step_time: StepTimeModel, router: Router
    ) -> None:
        self.load = load
        self._config = config
        self._step_time = step_time
        replica_of_row = _assign(router, load)
        rows = np.argsort(replica_of_row, kind="stable")
        bounds = np.searchsorted(replica_of_row[rows], np.arange(1, config.num_replicas))
        self._rows: list[NDArray[np.int64]] = np.split(rows, bounds)

    def __len__(self) -> int:
        return len(self._rows)

    def run(self, index: int, keep: Keep, on_progress: OnProgress) -> tuple[ReplicaCounters, bool]:
        """Run one replica; return what it did, and whether it came to the end.

        Parameters
        ----------
        keep : takes each record.
        """
        config, rows = self._config, self._rows[index]
        replica = make_replica(index, config, self._step_time, is_alone=True)
        is_complete = True
        if rows.size:
            clients = Clients(self.load, config, rows=rows)
            collector = Collector(keep, on_progress=on_progress)
            is_complete = run_alone(clients, replica, collector)
        return replica.counters(), is_complete

    def run_all(self, keep: Keep, on_progress: OnProgress) -> tuple[list[ReplicaCounters], bool]:
        """Run the replicas one after the other; return what they did, and whether all came to the end."""
        counters = [ReplicaCounters() for _ in self._rows]
        for index in range(len(self)):
            counters[index], is_complete = self.run(index, keep, on_progress)
            if not is_complete:
                return counters, False
        return counters, True


def _assign(router: Router, load: OfferedLoad) -> NDArray[np.int32]:
    """Return the replica of each request of a load, by a router that ignores the replicas' state."""
    assert router.ignores_state

    def replica_of(index: int) -> int:
        choice = router.route(RoutingRequest(str(index)))
        assert choice is not None, "there is a member"
        return choice.replica

    return np.fromiter(map(replica_of, range(len(load))), np.int32, len(load))


@dataclass(frozen=True, slots=True)
class _Shard:
    """What comes back from a worker process."""

    index: int
    columns: RecordColumns
    counters: ReplicaCounters
    is_complete: bool


@dataclass(frozen=True, slots=True)
class _Shared:
    """What parent and workers share; it gets into a worker by the fork, since closures cannot be pickled."""

    replicas: IndependentReplicas
    num_finished: Synchronized[int]
    virtual_time: Synchronized[float]
    stop: Event


def run_in_processes(
    replicas: IndependentReplicas, jobs: int, keep: Keep, on_progress: OnProgress
) -> tuple[list[ReplicaCounters], bool]:
    """Run replicas in `jobs` processes; return what they did, and whether all came to the end.

    Raises
    ------
    ConfigError : this platform cannot fork.
    OnbeatError : a worker process died.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigError(f"jobs is {jobs}, but this platform cannot fork processes; use jobs=1")
    context = multiprocessing.get_context("fork")
    shared = _Shared(replicas, context.Value("q", 0), context.Value("d", 0.0), context.Event())
    with ProcessPoolExecutor(jobs, context, _begin_worker, (shared,)) as executor:
        try:
            # The first one forks the workers: here, where no other thread of ours runs yet.
            pending = {executor.submit(_run_in_worker, index) for index in range(len(replicas))}
            collection = _Collection(shared, pending, keep)
            collection.start()
        except KeyboardInterrupt:
            shared.stop.set()
            return [ReplicaCounters() for _ in range(len(replicas))], False
        _wait(collection, shared, on_progress)
    if collection.error is not None:
        raise collection.error
    return collection.counters, collection.is_complete


def _wait(collection: _Collection, shared: _Shared, on_progress: OnProgress) -> None:
    """Tell of progress until all has come back; Ctrl-C makes it come back at once."""
    num_reported = 0
    while not collection.is_over:
        # Futures, locks and `join` do not survive Ctrl-C in the thread that waits for them; `sleep` does.
        try:
            time.sleep(_POLL_SECONDS)
            num_finished = shared.num_finished.get_obj().value
            on_progress(num_finished - num_reported, shared.virtual_time.get_obj().value)
            num_reported = num_finished
        except KeyboardInterrupt:
            shared.stop.set()
    collection.join()


class _Collection(threading.Thread):
    """Takes in what comes back from the worker processes."""

    def __init__(self, shared: _Shared, pending: set[Future[_Shard]], keep: Keep) -> None:
        super().__init__(name="onbeat-simulation")
        self.counters = [ReplicaCounters() for _ in range(len(shared.replicas))]
        self.is_complete = True
        self.is_over = False
        self.error: Exception | None = None
        self._shared = shared
        self._pending = pending
        self._keep = keep

    def run(self) -> None:
        """Run until every replica has come back, or one has failed."""
        try:
            self._collect()
        except BrokenProcessPool:
            self.error = OnbeatError(
                "a worker process of the simulation died, perhaps for want of memory; try fewer jobs"
            )
        except Exception as error:  # raised again by the thread that waits for this one
            self.error = error
        finally:
            self.is_over = True

    def _collect(self) -> None:
        try:
            while self._pending:
                done, self._pending = wait(self._pending, return_when=FIRST_COMPLETED)
                for future in done:
                    self._take(future.result())
        finally:
            self._shared.stop.set()  # after an error the others need not go on

    def _take(self, shard: _Shard) -> None:
        for row, record in shard.columns.records(self._shared.replicas.load):
            self._keep(row, record)
        self.counters[shard.index] = shard.counters
        self.is_complete &= shard.is_complete


_shared_in_worker: _Shared | None = None
"""Set in worker processes alone, when they begin."""


def _begin_worker(shared: _Shared) -> None:
    global _shared_in_worker
    _shared_in_worker = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    gc.freeze()  # the load stays shared with the parent as long as nobody writes to it


def _run_in_worker(index: int) -> _Shard:
    shared = _shared_in_worker
    assert shared is not None
    columns = RecordColumns(str(index))
    if shared.stop.is_set():
        return _Shard(index, columns, ReplicaCounters(), is_complete=False)

    def report(num_finished: int, last_end: float) -> None:
        with shared.num_finished.get_lock():
            shared.num_finished.value += num_finished
            shared.virtual_time.value = max(shared.virtual_time.value, last_end)
        if shared.stop.is_set():
            raise KeyboardInterrupt

    counters, is_complete = shared.replicas.run(index, columns.append, report)
    return _Shard(index, columns, counters, is_complete)
