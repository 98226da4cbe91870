"""Lets the start of two workers of vLLM fail once they have their weights.

    python -m tests.vllm.faults_program FOLDER

Prints JSON: why, and the processes that are left.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from onbeat.core.errors import ConfigError
from tests.vllm.executor_program import Bench
from tests.vllm.tiny_models import make_model


def main(folder: Path) -> dict[str, Any]:
    make_model("Llama", folder)
    try:
        # No KV block fits, which vLLM finds once its workers have told what a block takes.
        Bench(
            folder,
            1,
            "float32",
            tensor_parallel_size=2,
            kv_cache_memory_bytes=1,
            num_gpu_blocks_override=None,
        )
    except ConfigError as error:
        return {"why": str(error), "left": [each.name for each in multiprocessing.active_children()]}
    return {"why": "", "left": []}


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(Path(sys.argv[1]))))  # noqa: T201
