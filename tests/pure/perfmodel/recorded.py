"""Files of recorded steps for tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def write_lines(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "steps.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def fpm(
    *,
    counter: int = 0,
    worker: str = "w",
    wall: float = 0.01,
    prompts: int = 0,
    tokens: int = 0,
    cached: int = 0,
    decodes: int = 0,
    context: int = 0,
) -> dict[str, Any]:
    """Return a message of forward-pass metrics."""
    queued = {"num_prefill_requests": 0, "sum_prefill_tokens": 0, "var_prefill_length": 0.0}
    queued |= {"num_decode_requests": 0, "sum_decode_kv_tokens": 0, "var_decode_kv_tokens": 0.0}
    scheduled = {
        "num_prefill_requests": prompts,
        "sum_prefill_tokens": tokens,
        "var_prefill_length": 0.0,
        "sum_prefill_kv_tokens": cached,
        "num_decode_requests": decodes,
        "sum_decode_kv_tokens": context,
        "var_decode_kv_tokens": 0.0,
    }
    return {
        "version": 1,
        "worker_id": worker,
        "dp_rank": 0,
        "counter_id": counter,
        "wall_time": wall,
        "scheduled_requests": scheduled,
        "queued_requests": queued,
    }


def fpm_line(counter: int, received: float, **sums: Any) -> dict[str, Any]:
    return {"received": received, "fpm": fpm(counter=counter, **sums)}


def made_up_steps(number: int, *, noise: float = 0.02) -> list[dict[str, Any]]:
    """Return lines of steps of a made-up engine: linear in their sums, with some noise."""
    draw, lines, end = random.Random(1), [], 0.0
    for index in range(number):
        decodes = draw.randint(0, 40)
        context = decodes * draw.randint(50, 1500)
        tokens = draw.randint(16, 512) if not decodes or draw.random() < 0.3 else 0
        seconds = 0.006 + 2e-5 * decodes + 2e-8 * context + 2.5e-5 * tokens + 0.001 * (tokens > 0)
        seconds *= draw.lognormvariate(0, noise)
        end += seconds
        counts = {"prompts": int(tokens > 0), "tokens": tokens, "decodes": decodes, "context": context}
        lines.append(fpm_line(index, end, wall=seconds, **counts))
    return lines
