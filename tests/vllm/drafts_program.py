"""Runs a tiny random model with drafts on vLLM's executor, and compares it with transformers.

    python -m tests.vllm.drafts_program METHOD FOLDER

Prints JSON, as `executor_program` does.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from onbeat.core.request import Grammar, SamplingParams
from onbeat.engine.vllm.arguments import speculation_of
from onbeat.hub.files import ModelFiles
from onbeat.speculative_config import SpeculativeConfig
from tests.vllm.executor_program import MAX_LEN, Bench, errors, greedy, prompts, tokens
from tests.vllm.tiny_models import SIZES, make_model

NUM_DRAFTS = 3


def make_head(folder: Path) -> None:
    """Save a random head of EAGLE's first kind: a layer, and what joins tokens with hidden states."""
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, dtype="float32")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    torch.manual_seed(5)
    layer = transformers.LlamaForCausalLM(config).model.layers[0]
    weights = {f"layers.0.{name}": each.contiguous() for name, each in layer.state_dict().items()}
    del weights["layers.0.input_layernorm.weight"]
    hidden = SIZES["hidden_size"]
    weights["fc.weight"] = torch.randn(hidden, 2 * hidden) * hidden**-0.5
    save_file(weights, folder / "model.safetensors")


def main(method: str, folder: Path) -> dict[str, Any]:
    model = make_model("Llama", folder / "model")
    draft = None
    if method == "eagle":
        make_head(folder / "head")
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
            "preemptions": scheduler.num_preemptions,
            "prefix_hits": scheduler.num_prefix_hits,
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
    lacked = replace(scored, min_p=0.1, temperature=0.5)
    outputs, _ = bench.serve([(asked[0][0], lacked)], speculation=speculation)
    found["left_out"] = [outputs[0][-1].finish_reason, str(outputs[0][-1].error)]
    return found


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], Path(sys.argv[2]))))  # noqa: T201
