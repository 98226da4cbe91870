"""Embeds prompts by vLLM's workers under onbeat's engine, and compares them with transformers.

    python -m tests.vllm.embed_program KIND FOLDER

Prints JSON. vLLM's workers can be made once a process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import numpy as np
import torch
import transformers

from onbeat import LLM
from onbeat.core.errors import ConfigError
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.vllm.executor_program import prompts
from tests.vllm.tiny_models import SIZES

POOLING = {
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def make(base: str, pooling: str, folder: Path) -> Any:
    """Save a random model that embeds, with the files of sentence-transformers."""
    write_tiny_directory(folder)
    config = getattr(transformers, f"{base}Config")(**SIZES, dtype="float32")
    torch.manual_seed(1)
    model = getattr(transformers, f"{base}Model")(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    size = {"word_embedding_dimension": SIZES["hidden_size"]}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps(size | {mode: name == pooling for name, mode in POOLING.items()})
    )
    return model


def main(base: str, pooling: str, folder: Path) -> dict[str, Any]:
    model = make(base, pooling, folder)
    whole: dict[str, Any] = {"policy": "prefill-first"} if pooling != "last" or base == "Bert" else {}
    asked = [tuple(token % 256 for token in prompt) for prompt in prompts(8)]
    errors = []
    options: dict[str, Any] = {"backend": "vllm", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}
    refused = ""
    if whole:
        try:
            LLM(str(folder), **options)
        except ConfigError as error:
            refused = str(error)
    with LLM(str(folder), **options, **whole) as llm:
        found = llm.embed(asked, normalize=False)
        with torch.inference_mode():
            for prompt, vector in zip(asked, found, strict=True):
                hidden = model(torch.tensor([prompt])).last_hidden_state[0]
                wanted = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[pooling]
                errors.append(float(np.abs(wanted.numpy() - vector).max()))
        return {
            "errors": errors,
            "size": len(found[0]),
            "pooling": llm.info.pooling,
            "generates": llm.info.generates,
            "refused": refused,
        }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))  # noqa: T201
