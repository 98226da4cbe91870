"""Predicts latencies for llm-d's endpoint picker: python examples/llm-d/predictor.py --profile profile.json.

`protocol` answers over HTTP, `latency` predicts and learns, and this file says which model servers there are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from latency import LatencyModel
from msgspec import Meta
from protocol import PredictionService, create_app

from onbeat.core.errors import ConfigError
from onbeat.files import read
from onbeat.perfmodel.device_spec import find_device
from onbeat.perfmodel.fitted import FitTarget
from onbeat.perfmodel.memory import USUAL_BATCHED_TOKENS, kv_capacity
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import make_step_time_model
from onbeat.perfmodel.profile import read_profile
from onbeat.typed import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """One kind of model server.

    Raises
    ------
    ConfigError : a number below 1, or a name that cannot stand in a path.
    """

    name: str = "default"
    profile: Path
    """Measured step times."""
    num_kv_tokens: Size | None = None
    """Tokens that its KV cache holds, as its log says; None: computed from the device's memory."""
    max_num_batched_tokens: Size = USUAL_BATCHED_TOKENS
    """Most tokens of one of its steps."""

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").replace("_", "").isalnum() or not self.name.isascii():
            raise ConfigError(f"a pool is named {self.name!r}; use letters, digits, - and _")
        for name in ("num_kv_tokens", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} of pool {self.name!r} is {value}; it must be at least 1")


_POOLS: Any = Annotated[tuple[PoolConfig, ...], Meta(min_length=1)]


def read_pools(path: Path) -> list[PoolConfig]:
    """Return the pools of a YAML file: a list of mappings with the fields of `PoolConfig`.

    Profiles are named as seen from the file.

    Raises
    ------
    ConfigError : the file cannot be read, or an entry is wrong; names it.
    """
    pools: tuple[PoolConfig, ...] = read(_POOLS, path, "the pools in")
    return [replace(each, profile=path.parent / each.profile) for each in pools]


def build_pools(configs: Sequence[PoolConfig]) -> dict[str, LatencyModel]:
    """Return what predicts each pool, by its name; the first is asked where nobody names one.

    Raises
    ------
    ConfigError : two have one name, a profile cannot be used, or nobody says how large a KV cache is.
    """
    pools: dict[str, LatencyModel] = {}
    for config in configs:
        if config.name in pools:
            raise ConfigError(f"two pools are named {config.name!r}; give each a name of its own")
        pools[config.name] = _model_of(config)
    return pools


def _model_of(config: PoolConfig) -> LatencyModel:
    key = read_profile(config.profile).key
    model, device = find_model_spec(key.model), find_device(key.device)
    target = FitTarget(model=model, device=device, parallelism=key.parallelism, precision=key.precision)
    predictor = make_step_time_model("fitted", target, profile=config.profile)
    num_kv_tokens = config.num_kv_tokens
    if num_kv_tokens is None:
        num_kv_tokens = kv_capacity(
            target,
            max_num_batched_tokens=config.max_num_batched_tokens,
        ).num_tokens
    return LatencyModel(
        predictor, num_kv_tokens=num_kv_tokens, max_num_batched_tokens=config.max_num_batched_tokens
    )


def main(args: list[str] | None = None) -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--profile", type=Path, help="profile of `onbeat profile`")
    which.add_argument("--pools", type=Path, help="several kinds of model servers (YAML)")
    parser.add_argument("--num-kv-tokens", type=int, help="tokens in a KV cache (default: by its memory)")
    parser.add_argument("--max-num-batched-tokens", type=int, help="most tokens in a step")
    parser.add_argument("--quantile", type=float, default=0.9, help="quantile to predict; 0: the mean")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    options = parser.parse_args(args)
    sizes = {
        name: value
        for name in ("num_kv_tokens", "max_num_batched_tokens")
        if (value := getattr(options, name)) is not None
    }
    if not 0 <= options.quantile < 1:
        parser.error(f"--quantile is {options.quantile:g}; it must be at least 0 and below 1")
    if options.pools is not None and sizes:
        parser.error(f"{', '.join(sizes)}: write it into the file of --pools")
    try:
        configs = (
            read_pools(options.pools) if options.pools else [PoolConfig(profile=options.profile, **sizes)]
        )
        service = PredictionService(build_pools(configs), options.quantile or None)
    except ConfigError as error:
        parser.error(str(error))
    print(
        f"predicting {', '.join(service.pools)} at http://{options.host}:{options.port}; set "
        "PREDICTION_SERVER_URL and TRAINING_SERVER_URL of llm-d's endpoint picker to this server",
        flush=True,
    )
    uvicorn.run(
        create_app(service), host=options.host, port=options.port, log_level="warning", access_log=False
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
