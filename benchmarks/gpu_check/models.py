"""Models of random weights: Llama-3.1-8B's shapes, a small one, and a tiny one to rehearse.

`python -m benchmarks.gpu_check.models FOLDER` writes configurations and a tokenizer there.
It downloads nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from benchmarks.gpu_check.record import IS_REHEARSAL, PACK, WORK
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.hf import model_config_from_hf

TEXT = Path(__file__).resolve().parents[2] / "tests" / "data" / "pride_and_prejudice.txt"
BYTES_OF_BANDWIDTH = 3.0e12
"""Bytes a second that a copy reached on an H100 SXM; floors are computed with it."""
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "small": {
        **_LLAMA,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "tiny": {
        **_LLAMA,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "vocab_size": 1024,
        "bos_token_id": 1021,
        "eos_token_id": 1022,
    },
}
_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")


def model_config(name: str) -> ModelConfig:
    """Return a model's configuration; when rehearsing that of the tiny one."""
    return model_config_from_hf(CONFIGS["tiny" if IS_REHEARSAL else name])


def model_folder(name: str) -> Path:
    """Return a folder that `onbeat serve --load-format dummy` takes."""
    name = "tiny" if IS_REHEARSAL else name
    # Named as a known model, so that a profile of it is taken for that one.
    folder = WORK / "models" / {"8b": "Llama-3.1-8B"}.get(name, name)
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
        packed = PACK / "models" / "tokenizer.json"
        if packed.exists() and not IS_REHEARSAL:
            shutil.copy(packed, folder)
        else:
            write_tokenizer(folder / "tokenizer.json", CONFIGS[name]["vocab_size"])
    return folder


def write_tokenizer(path: Path, num_entries: int) -> None:
    """Train a byte-level BPE on a book, and fill it up with plain words that no text becomes."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    num_trained = min(num_entries - len(_SPECIAL), 16000)
    trainer = BpeTrainer(
        vocab_size=num_trained,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(TEXT)], trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    for index in range(len(vocabulary), num_entries - len(_SPECIAL)):
        vocabulary[f"Ġword{index}"] = index
    content["added_tokens"] = [
        {
            "id": num_entries - len(_SPECIAL) + place,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for place, text in enumerate(_SPECIAL)
    ]
    path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")))
    assert Tokenizer.from_file(str(path)).get_vocab_size() == num_entries


def step_bytes(config: ModelConfig, rows: int, context: int) -> float:
    """Return the bytes that a decode step in bfloat16 must move: weights, KV, logits."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + config.num_heads * config.head_dim + 3 * config.intermediate_size)
    weights = 2 * (config.num_layers * layer + config.hidden_size * config.vocab_size)
    kv = rows * context * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
    return float(weights + kv + rows * config.vocab_size * 4)


def floor_ms(config: ModelConfig, rows: int, context: int) -> float:
    """Return the least milliseconds of a decode step at `BYTES_OF_BANDWIDTH`."""
    return step_bytes(config, rows, context) / BYTES_OF_BANDWIDTH * 1e3


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write_tokenizer(target / "tokenizer.json", CONFIGS["8b"]["vocab_size"])
