"""What a person names of a simulation: model, device, policy, limits, replicas. `resolve` says what it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from onbeat.core.errors import ConfigError
from onbeat.core.options import option, part
from onbeat.perfmodel.device_spec import CPU, find_device
from onbeat.perfmodel.engines import ENGINE_FORM, ENGINES, NO_ENGINE, require_engine
from onbeat.perfmodel.models import STEP_TIME_MODELS, require_step_time
from onbeat.scheduler.scheduler_config import SchedulerLimits
from onbeat.simulator.simulation_config import FleetTerms
from onbeat.simulator.speculation import Drafts
from onbeat.workload.offered import Overlong

AUTO = "auto"
DTypeName = Literal["bf16", "fp16", "fp32", "fp8", "int8", "int4", "mxfp4", "nvfp4"]

_hardware = partial(option, group="model and devices")
_fleet = partial(option, group="fleet")
_step = partial(option, group="step time")


def _known_device(text: str) -> str:
    return text if text == CPU else find_device(text).id  # a CPU is measured where it is looked up


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment(FleetTerms):
    """What a person names of a simulation. None means: from the model and the memory."""

    model: str = _hardware(
        help="a known model such as meta-llama/Llama-3.1-8B, or the path of a config.json or its directory"
    )
    device: str = _hardware(
        metavar="ID|FILE.yaml",
        parse=_known_device,
        help="device, such as h100-sxm, a100-80-sxm, l4, cpu, or your own (FILE.yaml)",
    )
    dtype: DTypeName = _hardware("bf16", help="number format of the weights")
    kv_cache_dtype: Literal["auto"] | DTypeName = _hardware(
        AUTO, help="number format of the KV cache; auto: a profile's, or the weights', at least 16 bits wide"
    )
    tensor_parallel: int = _hardware(
        1,
        flag="--tensor-parallel-size",
        aliases=("--tp",),
        at_least=1,
        metavar="N",
        help="devices that share each layer",
    )
    pipeline_parallel: int = _hardware(
        1,
        flag="--pipeline-parallel-size",
        aliases=("--pp",),
        at_least=1,
        metavar="N",
        help="stages of layers",
    )
    gpu_memory_utilization: float = _hardware(
        0.9, metavar="SHARE", above=0, at_most=1, help="share of the device's memory"
    )
    num_blocks: int | None = _hardware(
        None, at_least=1, metavar="N", help="KV blocks of a replica (default: what the memory holds)"
    )
    kv_bandwidth: float | None = _fleet(
        None,
        flag="--kv-transfer-gbps",
        unit="gbps",
        metavar="GBIT",
        above=0,
        help="speed of a replica's link, in either direction, gigabit/s; with it streams move with their KV "
        "(default: 200 with --disaggregate, else no link)",
    )
    kv_latency: float = _fleet(
        0.0,
        flag="--kv-transfer-latency-ms",
        unit="ms",
        metavar="MS",
        help="latency of that link",
    )
    limits: SchedulerLimits = part(SchedulerLimits)
    step_time: str = _step(
        "roofline",
        metavar="KIND",
        parse=require_step_time,
        help=f"model of step times: {', '.join(STEP_TIME_MODELS)}",
    )
    profile: Path | None = _step(
        None, metavar="FILE", help="file for --step-time fitted: a profile of `onbeat profile`"
    )
    engine: str = _step(
        NO_ENGINE,
        metavar=ENGINE_FORM,
        parse=require_engine,
        help=f"simulate a whole engine: {', '.join(ENGINES)}; vllm@0.12: as of that version; FILE.yaml: your "
        "own terms",
    )
    request_overhead: float | None = _step(
        None,
        flag="--request-overhead-ms",
        unit="ms",
        metavar="MS",
        help="server time added to each first token, such as tokenizing (default: from the profile or "
        "--engine, else 0)",
    )
    overlong: Overlong = option(
        "error", group="data set", help="what to do with requests that do not fit the context"
    )
    drafts: Drafts = part(Drafts)

    def __post_init__(self) -> None:
        if self.kv_latency and not self.hands_over:
            raise ConfigError(
                "--kv-transfer-latency-ms needs a link between replicas; give --kv-transfer-gbps or "
                "--disaggregate, or leave it out"
            )
        FleetTerms.__post_init__(self)

    @property
    def hands_over(self) -> bool:
        """Whether requests go on elsewhere with their KV."""
        return self.kv_bandwidth is not None or self.fleet.disaggregate is not None
