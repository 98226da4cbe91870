"""gpt-oss: experts with biases and a clamped activation, attention sinks, every other layer with a window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families import base
from onbeat.engine.model_config.families.base import Family, GgufRules
from onbeat.engine.model_config.values import Values


def _gpt_oss(config: ModelConfig, values: Values) -> ModelConfig:
    values.refuse_unless("swiglu_alpha", 1.702)
    values.refuse_unless("swiglu_limit", 7.0)
    layers = base.sliding_layers(values, 2, config.num_layers)
    return replace(
        base.with_layers(config, base.window_of(values), layers),
        hidden_activation="clamped_swiglu",
        experts=replace(base.experts_of(values), chooses_first=True, has_bias=True),
    )


def _parts(name: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a tensor of all experts holds: of each, gate and up row by row in turn.

    Numbers have their inputs first, [experts, D, 2 F]; blocks of MXFP4 and their scales come row by row.
    """
    prefix, found, kind = name.rpartition(".experts.")
    if not found:
        yield name, values
        return
    module, _, kind = kind.partition("_proj")
    kind = kind.removeprefix("_") or "weight"
    if kind == "weight":
        values = values.swapaxes(1, 2)
    for index, rows in enumerate(values):
        expert = f"{prefix}.experts.{index}"
        if module == "down":
            yield f"{expert}.down_proj.{kind}", rows
        else:
            yield f"{expert}.gate_proj.{kind}", rows[::2]
            yield f"{expert}.up_proj.{kind}", rows[1::2]


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    models="gpt-oss-20b, 120b",
    defaults={
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
    },
    always={"has_sinks": True},
    reads=frozenset({"num_local_experts", "sliding_window"}),
    complete=_gpt_oss,
    hf_names=((".mlp.router.", ".mlp.gate."),),
    hf_parts=_parts,
    gguf=GgufRules(architecture="gpt-oss", theta=150_000.0, truncates_yarn=False, has_windows=True),
)
