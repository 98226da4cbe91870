"""`onbeat predict`: predicted latencies for a router, over HTTP."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from onbeat.cli.options import add_options, read_options
from onbeat.core.errors import ConfigError
from onbeat.core.options import changed, check, option
from onbeat.perfmodel.memory import USUAL_BATCHED_TOKENS

_server = partial(option, group="server")
_predicted = partial(option, group="what is predicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """What is predicted, and where.

    Raises
    ------
    ConfigError : a value is out of range, or nobody says what predicts.
    """

    protocol: Literal["llm-d"] = _server("llm-d", help="protocol of the router that asks")
    profile: Path | None = _predicted(None, metavar="FILE", help="profile of `onbeat profile`")
    num_kv_tokens: int | None = _predicted(
        None,
        at_least=1,
        metavar="N",
        help="tokens in a model server's KV cache, as its log says (default: by its memory)",
    )
    max_num_batched_tokens: int = _predicted(
        USUAL_BATCHED_TOKENS, at_least=1, metavar="N", help="most tokens in a step of a model server"
    )
    pools: Path | None = _predicted(
        None, metavar="FILE.yaml", help="several kinds of model servers, in place of --profile"
    )
    quantile: float = _predicted(0.9, metavar="Q", help="quantile of latency to predict; 0: the mean")
    host: str = _server("0.0.0.0", help="address to listen on")
    port: int = _server(8000, help="port to listen on")

    def __post_init__(self) -> None:
        check(self, PredictOptions)
        if not 0 <= self.quantile < 1:
            raise ConfigError(f"--quantile is {self.quantile:g}; it must be at least 0 and below 1")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be between 0 and 65535")
        if (self.profile is None) == (self.pools is None):
            raise ConfigError(
                "one file says what predicts step times: give --profile FILE of `onbeat profile`, or "
                "--pools FILE.yaml for several kinds of model servers"
            )
        for each in changed(self) if self.pools is not None else ():
            if each.name in {"num_kv_tokens", "max_num_batched_tokens"}:
                raise ConfigError(f"{each.flag} is for --profile; write {each.name} into the file of --pools")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    add_options(parser, PredictOptions)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    options = read_options(args, PredictOptions)
    import uvicorn

    from onbeat.predict.llm_d import PredictionService, create_app
    from onbeat.predict.pools import PoolConfig, build_pools, read_pools

    if options.pools is not None:
        configs = read_pools(options.pools)
    else:
        assert options.profile is not None, "checked above"
        configs = [
            PoolConfig(
                profile=options.profile,
                num_kv_tokens=options.num_kv_tokens,
                max_num_batched_tokens=options.max_num_batched_tokens,
            )
        ]
    service = PredictionService(build_pools(configs), options.quantile or None)
    print(
        f"onbeat: predicting {', '.join(service.pools)} at http://{options.host}:{options.port}; set "
        "PREDICTION_SERVER_URL and TRAINING_SERVER_URL of llm-d's endpoint picker to this server",
        flush=True,
    )
    uvicorn.run(
        create_app(service), host=options.host, port=options.port, log_level="warning", access_log=False
    )
    return 0
