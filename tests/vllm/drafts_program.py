"""Runs a tiny random model with drafts on vLLM's executor, and compares it with transformers.

    python -m tests.vllm.drafts_program METHOD FOLDER

Prints JSON, as `executor_program` does.
"""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from onbeat.core.request import Grammar, SamplingParams
from onbeat.engine.vllm.surface import left_out, speculation_of
from onbeat.hub.files import ModelFiles
from onbeat.speculative_config import SpeculativeConfig
from tests.vllm.executor_program import MAX_LEN, Bench, errors, greedy, prompts, tokens
from tests.vllm.tiny_models import SIZES, make_model

NUM_DRAFTS = 3


HIDDEN = SIZES["hidden_size"]


def random_weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns) / math.sqrt(columns)


def make_head(folder: Path, method: str) -> None:
    """Save a random head of EAGLE: a layer, and what joins tokens with hidden states."""
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, dtype="float32")
    config.architectures = ["LlamaForCausalLM"]
    torch.manual_seed(5)
    layer = transformers.LlamaForCausalLM(config).model.layers[0]
    weights = {f"layers.0.{name}": each.contiguous() for name, each in layer.state_dict().items()}
    if method == "eagle":
        del weights["layers.0.input_layernorm.weight"]
    else:  # its layer reads tokens beside hidden states, and it has a head of its own
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = weights[f"layers.0.self_attn.{name}.weight"].shape[0]
            weights[f"layers.0.self_attn.{name}.weight"] = random_weight(rows, 2 * HIDDEN)
        weights |= {name: torch.ones(HIDDEN) for name in ("layers.0.hidden_norm.weight", "norm.weight")}
        weights["lm_head.weight"] = random_weight(SIZES["vocab_size"], HIDDEN)
        config.architectures = ["LlamaForCausalLMEagle3"]
        config.draft_vocab_size = SIZES["vocab_size"]
        config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    config.save_pretrained(folder)
    weights["fc.weight"] = random_weight(HIDDEN, 2 * HIDDEN)
    save_file(weights, folder / "model.safetensors")


def add_predictor(folder: Path) -> None:
    """Add to a saved Glm4Moe a random layer that predicts a token more, as its checkpoints have it."""
    number = SIZES["num_hidden_layers"]
    config = transformers.AutoConfig.from_pretrained(folder, num_hidden_layers=number + 1)
    torch.manual_seed(6)
    transformers.Glm4MoeForCausalLM(config).save_pretrained(folder / "longer")
    longer, weights = (load_file(each / "model.safetensors") for each in (folder / "longer", folder))
    layer = f"model.layers.{number}."
    weights |= {name: each for name, each in longer.items() if name.startswith(layer)}
    norms = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    weights |= {layer + name: torch.ones(HIDDEN) for name in norms}
    weights[layer + "eh_proj.weight"] = random_weight(HIDDEN, 2 * HIDDEN)
    weights[layer + "shared_head.head.weight"] = random_weight(SIZES["vocab_size"], HIDDEN)
    weights[layer + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config.num_hidden_layers, config.num_nextn_predict_layers = number, 1
    config.save_pretrained(folder)


def main(method: str, folder: Path) -> dict[str, Any]:
    model = make_model("Glm4Moe" if method == "mtp" else "Llama", folder / "model")
    draft = None
    if method == "mtp":
        add_predictor(folder / "model")
    elif method in ("eagle", "eagle3"):
        make_head(folder / "head", method)
        draft = ModelFiles(kind="hf", path=folder / "head", name="head")
    elif method == "draft-model":  # the model itself, all of whose drafts are right
        draft = ModelFiles(kind="hf", path=folder / "model", name="model")
    lookup: dict[str, Any] = {"prompt_lookup_max": 3, "prompt_lookup_min": 1} if method == "ngram" else {}
    config = SpeculativeConfig(
        method=method,  # type: ignore[arg-type]
        num_speculative_tokens=NUM_DRAFTS,
        draft_length="fixed",
        model=None if draft is None else draft.name,
        **lookup,
    )
    speculation = config.for_scheduler(is_ahead=True)
    bench = Bench(folder / "model", 1, "float32", speculative_config=speculation_of(config, draft))
    rng = random.Random(2)
    asked = [(each, SamplingParams(temperature=0.0, max_tokens=rng.randrange(5, 60))) for each in prompts(9)]
    for _ in range(3):
        pattern = tuple(rng.randrange(512) for _ in range(4))
        asked.append((pattern * 12, SamplingParams(temperature=0.0, max_tokens=80)))
    longest = tuple(rng.randrange(512) for _ in range(MAX_LEN - 9))
    asked.append((longest, SamplingParams(temperature=0.0, max_tokens=9)))
    expected = greedy(model, asked)
    found: dict[str, Any] = {"num_asked": len(asked)}
    ways: dict[str, dict[str, Any]] = {
        "alone": {"alone": True},
        "together": {},
        "short": {"num_blocks": MAX_LEN // 32 + 2},
        "two": {},
    }
    for way, options in ways.items():
        bench.depth = 2 if way == "two" else 1
        outputs, scheduler = bench.serve(asked, speculation=speculation, **options)
        found[way] = {
            "equal": sum(map(list.__eq__, tokens(outputs), expected)),
            "proposed": sum(each[-1].num_drafted_tokens for each in outputs),
            "accepted": sum(each[-1].num_accepted_tokens for each in outputs),
            "preemptions": scheduler.table.num_preemptions,
            "prefix_hits": scheduler.table.num_prefix_hits,
        }
    bench.depth = 1
    scored = SamplingParams(temperature=0.0, max_tokens=12, num_logprobs=3)
    again = [(prompt, scored) for prompt, _ in asked[7:12]]
    outputs, _ = bench.serve(again, num_prompt_logprobs=2, speculation=speculation)
    found["logprob_errors"] = errors(model, again, outputs)
    drawn = [(prompt, replace(scored, temperature=0.9, num_logprobs=None)) for prompt, _ in asked[:-1]]
    outputs, _ = bench.serve(drawn, speculation=speculation)
    found["drawn"] = sum(len(ids) == 12 for ids in tokens(outputs))
    words = SamplingParams(temperature=0.0, max_tokens=12, grammar=Grammar.of("start: /(a|b)(c|d)(e|f)/"))
    mixed = [(prompt, words if index % 2 else scored) for index, (prompt, _) in enumerate(asked)]
    outputs, _ = bench.serve(mixed, speculation=speculation)
    ends = [(ids, each[-1].finish_reason) for ids, each in zip(tokens(outputs), outputs, strict=True)]
    found["guided"] = [[*ids, reason] for ids, reason in ends[1::2]]
    found["left_out"] = sorted(left_out(bench.settings))
    return found


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], Path(sys.argv[2]))))  # noqa: T201
