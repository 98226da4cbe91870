"""Prompts and decodes on replicas of their own, with a KV transfer between them.

As in DistServe (Zhong et al., OSDI 2024, section 4): a prefill replica runs the prompt and delivers the
first token; its KV stays there until a decode replica has room and pulls it; the decode replica delivers the
rest. The wait for that room therefore lies between the first token and the second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onbeat.core.errors import ConfigError
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.policies import make_policy
from onbeat.simulator.client import Clients
from onbeat.simulator.collector import Collector
from onbeat.simulator.config import SimulationConfig
from onbeat.simulator.disaggregation_loop import DisaggregatedLoop
from onbeat.simulator.fleet import make_replica
from onbeat.simulator.kv_transfer import KVTransfer
from onbeat.simulator.observer import SimulationObserver
from onbeat.simulator.replica import VirtualReplica
from onbeat.simulator.result import ReplicaCounters
from onbeat.workload.offered import OfferedLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Equal replicas for one of the two phases.

    Raises
    ------
    ConfigError : no replica.
    """

    num_replicas: int
    scheduler: SchedulerConfig
    """Limits of one replica; its `num_micro_batches` is the number of pipeline stages."""
    step_time: StepTimeModel
    """Through all stages of one replica."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigError(f"a pool has {self.num_replicas} replicas; it needs at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationConfig:
    """Two pools and what lies between. New requests go to the prefill replica with the fewest requests.

    Raises
    ------
    ConfigError : a policy that cannot hand requests over or plans with deadlines, or a cap below the longest
        request.
    """

    prefill: PoolConfig
    decode: PoolConfig
    transfer: KVTransfer
    decode_kv_cap_tokens: int | None = None
    """Most tokens whose KV a decode replica holds, where that is less than its memory takes."""

    def __post_init__(self) -> None:
        if self.prefill.scheduler.policy == "static":
            raise ConfigError(
                "a prefill replica cannot run policy static: it would hold whole batches; use orca"
            )
        for pool in (self.prefill, self.decode):
            if make_policy(pool.scheduler).needs_step_time:
                raise ConfigError(
                    f"policy {pool.scheduler.policy!r} plans a request from its arrival to its last token, "
                    "of which a pool sees a part only: use sarathi for prompts and for generation"
                )
        cap, longest = self.decode_kv_cap_tokens, self.decode.scheduler.max_model_len
        if (
            cap is not None
            and cap // self.decode.scheduler.block_size * self.decode.scheduler.block_size < longest
        ):
            raise ConfigError(
                f"decode_kv_cap_tokens is {cap}, but one request may have {longest} tokens (max_model_len); "
                "raise the cap or lower max_model_len"
            )

    @property
    def max_model_len(self) -> int:
        """The longest request that both pools take."""
        return min(self.prefill.scheduler.max_model_len, self.decode.scheduler.max_model_len)

    @property
    def decode_scheduler(self) -> SchedulerConfig:
        """Limits of a decode replica, the cap included.

        Its queue has none: who comes here was taken at its arrival, and has its first token.
        """
        scheduler = replace(
            self.decode.scheduler,
            max_num_queued_reqs=None,
            max_num_queued_tokens=None,
            max_queue_seconds=None,
        )
        if self.decode_kv_cap_tokens is None:
            return scheduler
        num_blocks = min(scheduler.num_blocks, self.decode_kv_cap_tokens // scheduler.block_size)
        return replace(scheduler, num_blocks=num_blocks)


def run_disaggregated(
    load: OfferedLoad,
    config: SimulationConfig,
    collector: Collector,
    *,
    observer: SimulationObserver | None = None,
) -> tuple[list[ReplicaCounters], bool]:
    """Run a load through both pools.

    Parameters
    ----------
    config : with `disaggregation`, whose schedulers and counts take the place of its own.
    collector : takes the records; one a request, over both pools.
    observer : hears of steps; prefill replicas are numbered first, then decode replicas.

    Returns
    -------
    What each replica did, and whether the run came to its end (Ctrl-C).
    """
    pools = config.disaggregation
    assert pools is not None
    load.check_lengths(pools.max_model_len, overlong="error")
    clients = Clients(load, _pool_config(pools.prefill.scheduler, config))
    prefill = _make_pool(0, pools.prefill, pools.prefill.scheduler, config, observer)
    decode = _make_pool(len(prefill), pools.decode, pools.decode_scheduler, config, observer)
    is_complete = True
    try:
        DisaggregatedLoop(clients, prefill, decode, pools.transfer, collector).run()
    except KeyboardInterrupt:
        is_complete = False
    collector.report()
    return [replica.counters() for replica in (*prefill, *decode)], is_complete


def _pool_config(scheduler: SchedulerConfig, config: SimulationConfig) -> SimulationConfig:
    return replace(config, scheduler=scheduler, pipeline=scheduler.num_micro_batches, disaggregation=None)


def _make_pool(
    first: int,
    pool: PoolConfig,
    scheduler: SchedulerConfig,
    config: SimulationConfig,
    observer: SimulationObserver | None,
) -> list[VirtualReplica]:
    own = _pool_config(scheduler, config)
    indices = range(first, first + pool.num_replicas)
    return [make_replica(index, own, pool.step_time, observer=observer) for index in indices]
