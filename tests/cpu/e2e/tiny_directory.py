"""A Hugging Face directory of a tiny model, every byte a token; weights are left to `--load-format dummy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_SPECIAL = 3
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|stop|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256 + NUM_SPECIAL,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 258,
}


def write_tiny_directory(path: Path, **config: Any) -> Path:
    """Write configuration and tokenizer; `config` changes the configuration."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in ("<|bos|>", "<|start|>", "<|stop|>")])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|stop|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
