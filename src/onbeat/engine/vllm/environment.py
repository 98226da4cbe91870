"""What the process of an engine that vLLM runs has in its environment from its first instruction on."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

from onbeat.engine.container import usable_cores
from onbeat.engine.device import has_gpu
from onbeat.engine.engine_config import EngineConfig

_OPENMP = "libgomp|libomp|libiomp"
"""Of which one may be the user's own."""


def process_environment(config: EngineConfig) -> dict[str, str]:
    """Return what is to be set before the process starts; nothing where vLLM does not run on a CPU.

    On CPUs vLLM preloads PyTorch's OpenMP library into its own workers. So that several libraries of one
    process share its threads, it must be there before any of them. It counts its threads as it is loaded.
    """
    is_asked = config.backend == "vllm" or config.vllm_arguments or config.num_loras
    on_cpu = config.device == "cpu" or (config.device == "auto" and not has_gpu())
    preloaded = os.environ.get("LD_PRELOAD", "")
    torch = find_spec("torch")
    if not is_asked or not on_cpu or config.load_format == "stand-in" or torch is None or not torch.origin:
        return {}
    package = Path(torch.origin).parent
    folders = package.with_name("torch.libs"), package / "lib"
    found = [str(file) for folder in folders for file in sorted(folder.glob("libgomp*.so*"))][:1]
    threads = max((config.threads or usable_cores()) // config.tensor_parallel_size, 1)
    changes = {
        "LD_PRELOAD": ":".join(filter(None, (preloaded, *found))),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    return changes if found and not re.search(_OPENMP, preloaded) else {}
