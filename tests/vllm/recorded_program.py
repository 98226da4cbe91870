"""Serves a tiny model on vLLM's workers with step times that are measured at start, and keeps a record.

    python -m tests.vllm.recorded_program FOLDER

The record is that of FOLDER/record.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from onbeat.core.options import make
from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.start import build_engine
from onbeat.hub.resolve import resolve_model
from tests.cpu.e2e.tiny_directory import write_tiny_directory


def main(folder: Path) -> None:
    model = write_tiny_directory(folder / "tiny", hidden_size=128, max_position_embeddings=512)
    config = make(
        EngineConfig,
        model=resolve_model(str(model), needs_weights=False),
        backend="vllm",
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=6,
        kv_cache_memory_bytes=2**19,
        enforce_eager=True,
        threads=1,
        step_time_profile="calibrate",
        record=folder / "record",
    )
    core, _ = build_engine(config, lambda _: None)
    rng = random.Random(1)
    shared = tuple(rng.randrange(256) for _ in range(100))
    for index in range(16):
        prompt = (*shared[: rng.choice([0, 96])], *(rng.randrange(256) for _ in range(rng.randrange(1, 200))))
        core.add(
            Request(
                request_id=str(index),
                prompt_token_ids=prompt,
                arrival=time.monotonic(),
                sampling=SamplingParams(temperature=1.0, max_tokens=rng.randrange(1, 120)),
                slo=SLO(ttft=rng.choice([0.05, 1.0]), tbt=0.05) if index % 2 else None,
            )
        )
        core.step()
    while core.has_work:
        core.step()
    core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
