"""`onbeat.vllm.StepLog`: writes down the steps of a plain vLLM server, for `onbeat profile --from FILE`.

vLLM finds it by its entry point (`vllm.stat_logger_plugins`) where onbeat is installed beside it. It writes
only where the environment variable `ONBEAT_STEP_LOG` names a file, and needs
`--enable-logging-iteration-details`.
Read from vLLM 0.32 and 0.33; a newer one that tells less ends the file with a sentence in vLLM's log, and
nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from onbeat.core.errors import ConfigError
from onbeat.vllm.origin import origin_of
from onbeat.vllm.step_lines import StepLines, StepWriter

ENVIRONMENT = "ONBEAT_STEP_LOG"

logger = init_logger("vllm.onbeat.step_log")


class StepLog(StatLoggerBase):  # type: ignore[misc] # vLLM need not be there where types are checked
    """One engine's steps, as vLLM's front process hears of them.

    Raises
    ------
    ConfigError : the file is named, but vLLM was started so that its steps cannot be told.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._config = vllm_config
        self._index = engine_index
        self._writer: StepWriter | None = None
        name = os.environ.get(ENVIRONMENT)
        if name:
            require_details(vllm_config)
            path = Path(name if not engine_index else f"{name}.{engine_index}")
            self._writer = StepWriter(path, origin_of(vllm_config))
            logger.info("onbeat writes the steps of engine %d to %s", engine_index, path)
        self._lines: StepLines | None = None

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,  # noqa: ARG002 - vLLM's interface
        engine_idx: int = 0,  # noqa: ARG002
    ) -> None:
        """Take what vLLM tells of a step; never raise, since its answers hang on it."""
        if self._writer is None:
            return
        try:
            if self._lines is None:  # the number of blocks is known once the engine runs
                self._lines = StepLines(
                    kv_tokens=kv_tokens(self._config),
                    block_size=self._config.cache_config.block_size,
                    plans_ahead=bool(self._config.scheduler_config.async_scheduling),
                )
            self._writer.write(self._lines.take(scheduler_stats, iteration_stats))
        except Exception:
            logger.exception(
                "onbeat stops to write steps down: this vLLM tells them otherwise, or the disk is full"
            )
            self._writer.close()
            self._writer = None

    def log_engine_initialized(self) -> None:
        """Do nothing: the header was written at the start."""


def require_details(vllm_config: Any) -> None:
    """Refuse a server that does not tell of its steps, or not of all."""
    if not vllm_config.observability_config.enable_logging_iteration_details:
        raise ConfigError(
            f"{ENVIRONMENT} names a file, but vLLM does not tell of its steps; start it with "
            "--enable-logging-iteration-details"
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            f"{ENVIRONMENT} names a file, but steps with vLLM's speculative decoding are not recorded; leave "
            "out --speculative-config"
        )
    if getattr(vllm_config.parallel_config, "_api_process_count", 1) > 1:
        raise ConfigError(
            f"{ENVIRONMENT} names a file, but with several API servers none hears of all steps; give "
            "--api-server-count 1"
        )


def kv_tokens(vllm_config: Any) -> int:
    """Return the tokens that the KV cache of one engine holds."""
    cache = vllm_config.cache_config
    num_engines = vllm_config.parallel_config.data_parallel_size  # whose blocks the front process adds up
    return int((cache.num_gpu_blocks or 0) // num_engines * cache.block_size)
