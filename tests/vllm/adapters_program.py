"""Runs random LoRA adapters on vLLM's executor, and compares them with transformers' merged weights.

    python -m tests.vllm.adapters_program FOLDER

vLLM's workers can be made once a process. Prints JSON.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from onbeat.core.errors import ConfigError
from onbeat.core.request import Adapter, SamplingParams
from onbeat.engine.vllm.surface import lora_arguments
from tests.vllm.executor_program import MAX_LEN, Bench, greedy, prompts, tokens
from tests.vllm.tiny_models import make_model

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(model: Any, folder: Path, *, rank: int, alpha: int, seed: int) -> dict[str, Any]:
    """Save a random adapter as PEFT does; return what it adds to each of the model's weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for name, weight in model.named_parameters():
        module = name.removesuffix(".weight")
        if not module.endswith(MODULES):
            continue
        rows, columns = weight.shape
        down = torch.randn(rank, columns, generator=generator) * columns**-0.5
        up = torch.randn(rows, rank, generator=generator) * rank**-0.5
        tensors[f"base_model.model.{module}.lora_A.weight"] = down
        tensors[f"base_model.model.{module}.lora_B.weight"] = up
        added[name] = alpha / rank * up @ down
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": MODULES, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    return added


def merged(model: Any, added: dict[str, Any], asked: Any) -> list[list[int]]:
    """Return transformers' tokens with an adapter merged into the weights."""
    weights = dict(model.named_parameters())
    kept = {name: weights[name].detach().clone() for name in added}
    with torch.no_grad():
        for name, change in added.items():
            weights[name].add_(change)
        found = greedy(model, asked)
        for name, weight in kept.items():
            weights[name].copy_(weight)
    return found


def main(folder: Path) -> dict[str, Any]:
    model = make_model("Llama", folder / "model")
    of_first = make_adapter(model, folder / "first", rank=4, alpha=8, seed=1)
    of_second = make_adapter(model, folder / "second", rank=16, alpha=16, seed=2)
    make_adapter(model, folder / "large", rank=32, alpha=16, seed=3)
    bench = Bench(folder / "model", 2, "float32", **lora_arguments(2, 16, is_cpu=True))
    rng = random.Random(2)
    asked = [(each, SamplingParams(temperature=0.0, max_tokens=rng.randrange(5, 50))) for each in prompts(8)]
    # Two under one name, as after a change in place.
    first, second = (Adapter("sql", str(folder / name), 1 + i) for i, name in enumerate(("first", "second")))
    answers = {None: greedy(model, asked), first: merged(model, of_first, asked)}
    answers[second] = merged(model, of_second, asked)
    # Each prompt three times, so that what differs in a prefix is the adapter alone.
    order = [(index, adapter) for index in range(len(asked)) for adapter in answers]
    wanted = [answers[adapter][index] for index, adapter in order]
    options: dict[str, Any] = {"adapters": [adapter for _, adapter in order]}
    mixed = [asked[index] for index, _ in order]
    together, scheduler = bench.serve(mixed, **options)
    tight, tight_scheduler = bench.serve(mixed, num_blocks=MAX_LEN // bench.surface.block_size + 2, **options)
    found: dict[str, Any] = {
        "num_asked": len(mixed),
        "num_distinct": len({tuple(map(tuple, each)) for each in answers.values()}),
        "together": sum(map(list.__eq__, tokens(together), wanted)),
        "tight": sum(map(list.__eq__, tokens(tight), wanted)),
        "prefix_hits": scheduler.table.num_prefix_hits,
        "preemptions": tight_scheduler.table.num_preemptions,
    }
    # n choices share the prefix of their adapter, and each is what one alone would be.
    twice, scheduler = bench.serve([asked[0]] * 2, alone=True, adapters=[first] * 2)
    found["choices"] = sum(each == answers[first][0] for each in tokens(twice))
    found["shared"] = scheduler.table.num_prefix_hits
    # One that nobody needs gives its place to another.
    third = Adapter("third", str(folder / "first"), 3)
    outputs, _ = bench.serve(asked, adapters=([third, second, None] * 3)[: len(asked)])
    pairs = enumerate(tokens(outputs))
    found["replaced"] = sum(each == answers[(first, second, None)[index % 3]][index] for index, each in pairs)
    found["refused"] = []
    for number, name in enumerate(("large", "missing"), start=4):
        try:
            bench.surface.add_adapter(Adapter(name, str(folder / name), number))
        except ConfigError as error:
            found["refused"].append(str(error))
    outputs, _ = bench.serve(asked, adapters=[second] * len(asked))
    found["afterwards"] = sum(map(list.__eq__, tokens(outputs), answers[second]))
    return found


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(Path(sys.argv[1]))))  # noqa: T201
