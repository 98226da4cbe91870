"""Serves a tiny model on vLLM's workers with step times that are measured at start, and keeps a record.

    python -m tests.vllm.recorded_program KIND FOLDER

KIND is a family of `tiny_models`, or `adapters`: Llama with two of them. The record is that of FOLDER/record.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from onbeat.core.options import make
from onbeat.core.request import Adapter, Request, SamplingParams
from onbeat.core.slo import SLO
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.start import build_engine
from onbeat.hub.resolve import resolve_model
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.vllm.adapters_program import make_adapter
from tests.vllm.tiny_models import make_model


def main(kind: str, folder: Path) -> None:
    path = write_tiny_directory(folder / "tiny")
    model = make_model("Llama" if kind == "adapters" else kind, path)
    adapters: list[Adapter | None] = [None]
    if kind == "adapters":
        for number in (1, 2):
            make_adapter(model, folder / str(number), rank=4, alpha=8, seed=number)
            adapters.append(Adapter(str(number), str(folder / str(number)), number))
    config = make(
        EngineConfig,
        model=resolve_model(str(path), needs_weights=True),
        backend="vllm",
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=6,
        kv_cache_memory_bytes=2**19,
        enforce_eager=True,
        threads=1,
        step_time_profile="calibrate",
        record=folder / "record",
        max_loras=len(adapters) - 1 or None,
    )
    core, _ = build_engine(config, lambda _: None)
    for adapter in filter(None, adapters):
        core.executor.load_adapter(adapter, [1, 2]).result()
    rng = random.Random(1)
    shared = tuple(rng.randrange(256) for _ in range(100))
    for index in range(16):
        prompt = (*shared[: rng.choice([0, 96])], *(rng.randrange(256) for _ in range(rng.randrange(1, 200))))
        core.add(
            Request(
                request_id=str(index),
                prompt_token_ids=prompt,
                arrival=time.monotonic(),
                adapter=adapters[index % len(adapters)],
                sampling=SamplingParams(temperature=1.0, max_tokens=rng.randrange(1, 120)),
                slo=SLO(ttft=rng.choice([0.05, 1.0]), tbt=0.05) if index % 2 else None,
            )
        )
        core.step()
    while core.has_work:
        core.step()
    core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
