"""An installation without torch: stand-ins and the native engine serve, and the rest says what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from onbeat.engine.native.library import NativeLibrary

PROGRAM = """
import sys

sys.modules["torch"] = None  # importing it fails from now on, as where it is not installed
from onbeat import LLM, SamplingParams
from onbeat.core.errors import MissingExtra

greedy, drawn = SamplingParams(temperature=0.0, max_tokens=4), SamplingParams(max_tokens=4, seed=1)
with LLM(sys.argv[1], load_format="stand-in", device="l4") as llm:
    print(len(llm.generate(["Hello"], greedy)[0].token_ids))
options = {"threads": 1, "max_model_len": 256, "kv_cache_memory_bytes": 2**24}
with LLM(sys.argv[1], speculative_config={"method": "ngram", "num_speculative_tokens": 2}, **options) as llm:
    print(llm.generate(["The capital of France is"], greedy)[0].text.strip())
    print(len(llm.generate(["Hello"], drawn)[0].token_ids))
try:
    LLM(sys.argv[1], **options, backend="torch")
except MissingExtra as error:
    print(error)
assert not [name for name in sys.modules if name.startswith("torch.")]
"""


def test_what_needs_no_torch_imports_none(smollm2_gguf: Path, native_library: NativeLibrary) -> None:
    command = [sys.executable, "-c", PROGRAM, str(smollm2_gguf)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "4",
        "Paris.",
        "4",
        "a model that runs by torch (as asked for) needs 'torch', which is not installed: "
        "pip install 'onbeat[torch]'",
    ]
