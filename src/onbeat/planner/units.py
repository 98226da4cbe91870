"""Units: what a fleet is put together from, and about how much each serves of each size of request.

A unit is one replica of the model on so many devices of a type. Its rate for a size of request is that of a
steady state: as many streams as memory and the TBT objective allow, and beside them as many prompt tokens in
each step as keep them going. It knows nothing of queues; a search for the rate that a unit keeps up under the
whole load says by how much it is too high or too low (`calibrated`).

The load is cut into buckets of requests of like size and equal objectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError, DoesNotFit
from onbeat.core.fleet import PoolSizes
from onbeat.core.options import change
from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.perfmodel.device_spec import is_spec_file
from onbeat.perfmodel.memory import Choices
from onbeat.planner.prices import Prices
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.result import IdleReplica
from onbeat.workload.offered import OfferedLoad

PROMPT_EDGES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Upper ends of the ranges of prompt tokens; the last range has none."""
OUTPUT_EDGES = (16, 64, 128, 256, 512, 1024, 2048)
"""The same of output tokens."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Requests that the planner takes to be alike."""

    share: float
    """Of all requests, in (0, 1]."""
    num_prompt_tokens: int
    """Their mean, rounded."""
    num_output_tokens: int
    slo: SLO
    rows: Rows
    """Of the load."""

    @property
    def name(self) -> str:
        return f"{self.num_prompt_tokens} in, {self.num_output_tokens} out"


def buckets_of(load: OfferedLoad) -> tuple[Bucket, ...]:
    """Return the buckets that hold requests, by class of objectives, prompt and output."""
    prompts = np.searchsorted(PROMPT_EDGES, load.num_prompt_tokens)
    outputs = np.searchsorted(OUTPUT_EDGES, load.num_output_tokens)
    classes = np.zeros(len(load), np.int64) if load.class_ids is None else load.class_ids.astype(np.int64)
    keys = np.stack([classes, prompts, outputs], axis=1)
    _, bucket_of_row = np.unique(keys, axis=0, return_inverse=True)
    bucket_of_row = bucket_of_row.reshape(-1)
    buckets = []
    for number in range(int(bucket_of_row.max()) + 1):
        rows = np.flatnonzero(bucket_of_row == number)
        buckets.append(
            Bucket(
                share=len(rows) / len(load),
                num_prompt_tokens=round(float(load.num_prompt_tokens[rows].mean())),
                num_output_tokens=round(float(load.num_output_tokens[rows].mean())),
                slo=load.slo(int(rows[0])) or SLO(),
                rows=rows,
            )
        )
    return tuple(buckets)


def rows_of(buckets: Sequence[Bucket]) -> Rows:
    """Return the rows of some buckets, in the order of the load."""
    return np.sort(np.concatenate([bucket.rows for bucket in buckets]))


Array = NDArray[np.float64]

WORTH = 1.05
"""A unit of more devices stays only if it serves so much more per dollar somewhere, as estimated."""
MISJUDGED = 0.7
"""A unit that keeps up a smaller share of its estimate has not beaten others by that estimate."""


def device_text(device: str) -> str:
    """Return a device as tables spell it: a known one in capitals, a file of one as it was given."""
    return device if is_spec_file(device) else device.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One replica on some devices of a type."""

    settings: Deployment
    usd_per_hour: float
    """Of all its devices."""
    watts: float
    """That all its devices draw at most."""

    @property
    def device(self) -> str:
        return self.settings.device

    @property
    def num_devices(self) -> int:
        return self.settings.tensor_parallel

    @property
    def name(self) -> str:
        """As tables spell it: `H100-SXM`, `2 H100-SXM`."""
        device = device_text(self.device)
        return device if self.num_devices == 1 else f"{self.num_devices} {device}"

    def times(self, count: int) -> str:
        """Return several as tables spell them: `3 \u00d7 L4`, `3 \u00d7 (2 L4)`."""
        return f"{count} \u00d7 {self.name if self.num_devices == 1 else f'({self.name})'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedUnit:
    """A unit with its rates."""

    unit: Unit
    rates: Array
    """Requests per second of each bucket that it serves when it serves no other; 0 where it cannot."""
    factor: float = 1.0
    """What the steady rates were multiplied by: of a unit alone, without which queues would grow."""

    def rate(self, buckets: Sequence[Bucket]) -> float:
        """Return the requests per second of the whole load, buckets that it cannot serve left out.

        Returns
        -------
        0 where it can serve none.
        """
        shares = np.array([bucket.share for bucket in buckets])
        serves = self.rates > 0
        if not serves.any():
            return 0.0
        return float(shares[serves].sum() / (shares[serves] / self.rates[serves]).sum())

    def calibrated(self, factor: float) -> RatedUnit:
        """Return the unit with all rates multiplied."""
        return replace(self, rates=self.rates * factor, factor=self.factor * factor)


def make_units(
    base: Deployment,
    *,
    degrees: Sequence[int],
    available: Mapping[str, float],
    prices: Prices,
) -> tuple[list[Unit], dict[str, str]]:
    """Return the units that can hold the model, and why others cannot, by their names.

    Parameters
    ----------
    base : everything but device and degree.
    degrees : of tensor parallelism.
    available : devices of each type.

    Raises
    ------
    ConfigError : an unknown device, no price of one, or settings that are wrong for all.
    """
    units: list[Unit] = []
    left_out: dict[str, str] = {}
    errors: list[ConfigError] = []
    for device in available:
        price = prices.of(device)
        for count in degrees:
            settings = change(base, device=device, tensor_parallel=count)
            unit = Unit(settings=settings, usd_per_hour=count * price.usd_per_hour, watts=count * price.watts)
            if count > available[device]:
                left_out[unit.name] = f"only {available[device]:g} {device_text(device)} were offered"
                continue
            try:
                resolve(settings, choices=choices_of(available[device]))
            except ConfigError as error:
                errors.append(error)
                left_out[unit.name] = str(error)
            else:
                units.append(unit)
    if not units and errors and not any(isinstance(error, DoesNotFit) for error in errors):
        raise errors[0]
    return units, left_out


def choices_of(num_devices: float) -> Choices:
    """Return what may be changed where a unit does not hold the model, among so many devices."""
    return Choices(pipeline=None, most_devices=num_devices)


def _claimed(rated: RatedUnit) -> Array:
    """Return the rates by which a unit beats others."""
    return rated.rates / (rated.factor if rated.factor >= MISJUDGED else 1.0)


def share_in_time(unit: Unit, load: OfferedLoad) -> float:
    """Return the share of requests whose objectives a unit keeps that has nothing else to do."""
    simulation = resolve(unit.settings)
    idle = IdleReplica(simulation.step_time, simulation.config)
    rows = zip(load.num_prompt_tokens.tolist(), load.num_output_tokens.tolist(), strict=True)
    late = sum(
        idle.is_infeasible(load.slo(row) or SLO(), num_prompt, num_output)
        for row, (num_prompt, num_output) in enumerate(rows)
    )
    return 1 - late / len(load)


def rate_unit(unit: Unit, buckets: Sequence[Bucket]) -> RatedUnit:
    """Return a unit with its steady rates."""
    simulation = resolve(unit.settings)
    scheduler, host = simulation.config.scheduler, simulation.config.host_overhead
    idle = IdleReplica(simulation.step_time, simulation.config)
    rates = [
        _steady_rate(simulation.step_time, scheduler, host, bucket)
        if _can_serve(idle, scheduler, bucket)
        else 0.0
        for bucket in buckets
    ]
    return RatedUnit(unit=unit, rates=np.array(rates))


@cache
def longest_request(unit: Unit) -> int:
    """Return the longest request that a unit takes, tokens."""
    return resolve(unit.settings).config.scheduler.max_model_len


def _can_serve(idle: IdleReplica, scheduler: SchedulerConfig, bucket: Bucket) -> bool:
    num_prompt, num_output = bucket.num_prompt_tokens, bucket.num_output_tokens
    fits = num_prompt + num_output <= scheduler.max_model_len
    return fits and not idle.is_infeasible(bucket.slo, num_prompt, num_output)


def _steady_rate(
    step_time: StepTimeModel,
    scheduler: SchedulerConfig,
    host_overhead: float,
    bucket: Bucket,
    *,
    has_prompts: bool = True,
) -> float:
    """Return the requests per second with as many streams as memory and the TBT objective allow.

    Parameters
    ----------
    has_prompts : whether the streams' prompts are computed here, too.
    """
    num_prompt, num_output = bucket.num_prompt_tokens, bucket.num_output_tokens
    context = num_prompt + num_output // 2 + 1
    most = max(1, min(scheduler.max_num_seqs, scheduler.num_requests(num_prompt + num_output)))

    def seconds(num_streams: int) -> float:
        """Return the time of a step for each stream's next token, with its share of new prompts."""
        shape = BatchShape.of_decodes(num_streams, num_streams * context)
        if not has_prompts:
            return step_time.step_time(shape) + host_overhead
        wanted = num_streams * num_prompt / num_output
        room = max(1, scheduler.max_num_batched_tokens - num_streams)
        chunk = max(1, round(min(wanted, room)))
        shape.add(num_prompt // 2, chunk, samples=True)
        return (step_time.step_time(shape) + host_overhead) * max(1.0, wanted / chunk)

    limit = _pace(bucket.slo, num_output)
    low, high = 1, most
    while low < high:  # the most streams whose step is in time
        middle = (low + high + 1) // 2
        if seconds(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low / (num_output * seconds(low))


def pools_for(rated: RatedUnit, buckets: Sequence[Bucket], rate: float) -> PoolSizes | None:
    """Return how many replicas would do where some compute prompts and others generate, by arithmetic alone.

    A replica for prompts is a queue of equal jobs that come at random (M/D/1), whose mean wait the TTFT
    objective limits; one for generation is a steady rate of decodes alone. Rates have the unit's factor, if
    that is above 1: a queue that may leave the longest requests behind serves more of the others.

    Parameters
    ----------
    rate : of the whole load, requests per second.

    Returns
    -------
    None where the unit serves no request in time.

    References
    ----------
    Zhong et al., "DistServe", OSDI 2024, section 3.1.
    """
    simulation = resolve(rated.unit.settings)
    scheduler, host = simulation.config.scheduler, simulation.config.host_overhead
    prefill = decode = 0.0
    for bucket, steady in zip(buckets, rated.rates, strict=True):
        if steady <= 0:
            continue
        prompt = BatchShape()
        prompt.add(0, bucket.num_prompt_tokens, samples=True)
        seconds = simulation.step_time.step_time(prompt) + host
        if (room := (bucket.slo.ttft or inf) - seconds) <= 0:
            return None
        queue = 1.0 if room == inf else 2 * room / (2 * room + seconds)
        prefill += bucket.share * seconds / queue
        generated = _steady_rate(simulation.step_time, scheduler, host, bucket, has_prompts=False)
        decode += bucket.share / generated
    if not prefill:
        return None
    served = rate / max(1.0, rated.factor)
    return PoolSizes(prefill=max(1, ceil(served * prefill)), decode=max(1, ceil(served * decode)))


def _pace(slo: SLO, num_output_tokens: int) -> float:
    """Return the longest time between two tokens of a stream, seconds; infinite without an objective."""
    limits = [float("inf")]
    if slo.tbt is not None and num_output_tokens > 1:
        limits.append(slo.tbt)
    if slo.e2e is not None:
        limits.append(slo.e2e / num_output_tokens)
    return min(limits)


def without_dominated(rated: Sequence[RatedUnit]) -> tuple[list[RatedUnit], dict[str, str]]:
    """Leave out units that a smaller one of the same device beats for its money in every bucket.

    Both are taken by their estimates; a smaller one that is far below its own counts with what it keeps up.

    Returns
    -------
    Those that stay, and why others do not, by their names.
    """
    kept: list[RatedUnit] = []
    left_out: dict[str, str] = {}
    for each in sorted(rated, key=lambda one: one.unit.num_devices):
        per_dollar = each.rates / each.factor / each.unit.usd_per_hour
        better = next(
            (
                one
                for one in kept
                if one.unit.device == each.unit.device
                and (per_dollar <= WORTH * _claimed(one) / one.unit.usd_per_hour).all()
            ),
            None,
        )
        if not each.rates.any():
            left_out[each.unit.name] = "it keeps the objectives of no request, even alone"
        elif better is not None:
            left_out[each.unit.name] = f"it serves no more per dollar than {better.unit.name}, of any request"
        else:
            kept.append(each)
    return [one for one in rated if any(one is each for each in kept)], left_out
