"""From vLLM's statistics of a step to a line of a file of recorded steps.

vLLM tells how many requests and tokens a step had. It does not tell what it took where steps overlap, nor how
much context it read:

* what a step took is the least time between two tokens of a request in it, by the clock of the engine's own
  process. A step without decodes has none: where it had one prompt, whole, that request's own prefill time
  says it, once the request has ended;
* context is what the KV cache held before the step, by its share in use; of a last block half counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.logged_step import StepOrigin
from onbeat.perfmodel.step_log import header_line

_MOST_WAITING = 64
"""Steps that wait for their request to end; older ones are left out."""


class StepWriter:
    """A file of recorded steps that grows line by line: whoever kills the server has all that were told.

    Raises
    ------
    ConfigError : the file cannot be written.
    """

    def __init__(self, path: Path, origin: StepOrigin) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write steps to {path}: {error.strerror}; name another file") from error
        os.write(self._file, f"{header_line(origin)}\n".encode())

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        """Add lines."""
        for line in lines:
            os.write(self._file, f"{json.dumps(line)}\n".encode())

    def close(self) -> None:
        """End the file."""
        os.close(self._file)


class StepLines:
    """Turns what one engine tells into lines, in order.

    Parameters
    ----------
    kv_tokens : that the KV cache holds.
    block_size : tokens of a block.
    plans_ahead : whether the engine plans a step while the one before runs.
    """

    def __init__(self, *, kv_tokens: int, block_size: int, plans_ahead: bool) -> None:
        self._kv_tokens = kv_tokens
        self._half_block = block_size / 2
        self._plans_ahead = plans_ahead
        self._held = 0.0
        """Tokens in the KV cache after the last step."""
        self._partial = 0
        """Of these, tokens of prompts that are not through."""
        self._is_idle = True
        self._waiting: list[dict[str, Any]] = []
        """Steps of one whole prompt each, whose time is not known yet."""

    def take(self, scheduler: Any, iteration: Any) -> list[dict[str, Any]]:
        """Return the lines that a step's statistics make: its own, and earlier ones that are known now."""
        lines = self._ended(iteration)
        details = None if scheduler is None else scheduler.iteration_details
        if details is None:
            return lines
        if not details.is_dummy and not details.num_encoder_inputs:
            line = self._line(details, iteration)
            if "distance" in line:
                lines.append(line)
            elif self._is_whole_prompt(details, iteration) and (self._is_idle or not self._plans_ahead):
                self._waiting = [*self._waiting[1 - _MOST_WAITING :], line | {"follows_idle": self._is_idle}]
        self._look(scheduler, details, iteration)
        return lines

    def _line(self, details: Any, iteration: Any) -> dict[str, Any]:
        prompt_tokens, held, partial = details.num_ctx_tokens, self._held, self._partial
        if self._plans_ahead:  # this step's prompts had their blocks when the last step's share was looked at
            held -= prompt_tokens
        line = {
            "seconds": details.elapsed_ms / 1e3,
            "num_prompts": details.num_ctx_requests,
            "prompt_tokens": prompt_tokens,
            "num_decodes": details.num_generation_requests,
        }
        if details.num_ctx_requests:
            reused = 0 if iteration is None else iteration.prompt_token_stats.local_cache_hit
            line["prompt_cached_tokens"] = partial + reused
        if details.num_generation_requests:
            line["decode_cached_tokens"] = max(round(held - partial), details.num_generation_requests)
            if iteration is not None and iteration.inter_token_latencies_iter:
                line["distance"] = min(iteration.inter_token_latencies_iter)
        return line

    def _is_whole_prompt(self, details: Any, iteration: Any) -> bool:
        is_alone = details.num_ctx_requests == 1 and not details.num_generation_requests
        is_through = iteration is not None and len(iteration.time_to_first_tokens_iter) == 1
        return is_alone and is_through and not self._partial

    def _look(self, scheduler: Any, details: Any, iteration: Any) -> None:
        """Remember how things stand after a step."""
        num_started = 0 if iteration is None else len(iteration.time_to_first_tokens_iter)
        if not num_started:
            self._partial += details.num_ctx_tokens
        else:  # whoever is not through had an even share of the step's prompt tokens
            num_left = max(0, details.num_ctx_requests - num_started)
            self._partial = details.num_ctx_tokens * num_left // max(1, details.num_ctx_requests)
        running = scheduler.num_running_reqs
        held = scheduler.kv_cache_usage * self._kv_tokens - running * self._half_block
        self._held = max(0.0, held)
        waiting = scheduler.num_waiting_reqs + getattr(scheduler, "num_skipped_waiting_reqs", 0)
        self._is_idle = not running and not waiting
        if self._is_idle:
            self._partial = 0

    def _ended(self, iteration: Any) -> list[dict[str, Any]]:
        """Return the steps of which an ended request tells what they took."""
        found = []
        for request in () if iteration is None else iteration.finished_requests:
            num_computed = request.num_prompt_tokens - request.num_cached_tokens
            for line in self._waiting:
                if line["prompt_tokens"] == num_computed and not request.num_preemptions:
                    self._waiting.remove(line)
                    found.append(_timed(line, request))
                    break
        return found


def _timed(line: dict[str, Any], request: Any) -> dict[str, Any]:
    """Return a step of one prompt with its time; after idleness also what its server did beside steps."""
    was_idle = line.pop("follows_idle")
    line["distance"] = request.prefill_time
    beside = request.e2e_latency - request.queued_time - request.inference_time
    if was_idle and beside >= 0:
        line["request_seconds"] = beside
    return line
