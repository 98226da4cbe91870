"""Runs a tiny random model on vLLM's executor under onbeat's engine, and compares it with transformers.

    python -m tests.vllm.executor_program FAMILY FOLDER [ARGUMENTS]

ARGUMENTS are vLLM's, as JSON.

vLLM's workers can be made once a process, so that each family has one of its own. Prints JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

import torch

from onbeat.core.request import Grammar, Request, SamplingParams
from onbeat.engine.backends.vllm import can_compare, compare_steps
from onbeat.engine.core import EngineCore
from onbeat.engine.device import CPU, DeviceConfig
from onbeat.engine.dtypes import DTYPES
from onbeat.engine.executor import ThreadExecutor
from onbeat.engine.vllm.runner import VllmRunner
from onbeat.engine.vllm.surface import Settings, model_config_of, sampling_params, start_executor
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.text.grammar.compiler import GrammarCompiler, Vocabulary
from tests.fake_step_time import LinearStepTime
from tests.vllm.tiny_models import FAMILIES, SIZES, make_model

MAX_LEN = 512
BLOCK = 32
NUM_BLOCKS = 80


def prompts(number: int) -> list[tuple[int, ...]]:
    """Return prompts, some of which begin alike."""
    rng = random.Random(1)
    shared = [rng.randrange(512) for _ in range(100)]
    return [
        (*shared[: rng.choice([0, 48, 96])], *(rng.randrange(512) for _ in range(rng.randrange(1, 200))))
        for _ in range(number)
    ]


class Bench:
    """Serves requests on one executor, each time by an engine of its own."""

    def __init__(self, folder: Path, depth: int, dtype: str, **options: Any) -> None:
        self.dtype = dtype
        settings = Settings(
            {
                "model": str(folder),
                "skip_tokenizer_init": True,
                "enable_prefix_caching": False,
                "async_scheduling": depth > 1,
                "dtype": self.dtype,
                "max_model_len": MAX_LEN,
                "max_num_seqs": 6,
                "max_num_batched_tokens": 256,
                "block_size": BLOCK,
                "enforce_eager": True,
                "num_gpu_blocks_override": NUM_BLOCKS,
                "kv_cache_memory_bytes": 2**28,
                **options,
            },
            threads=1,
        )
        self.settings = settings
        self.surface, self.model = start_executor(settings), model_config_of(settings)
        self.depth = depth if self.surface.overlaps else 1
        self.num_blocks = self.surface.num_kv_blocks
        self._run = 0
        self._adapters: set[int] = set()

    def serve(
        self, asked: Sequence[tuple[tuple[int, ...], SamplingParams]], *, alone: bool = False, **options: Any
    ) -> tuple[list[list[Any]], Scheduler]:
        """Return the outputs of each request, by step, and the scheduler at the end."""
        self._run += 1
        limits = SchedulerConfig(
            policy="slo",
            num_blocks=options.get("num_blocks", self.num_blocks),
            enable_prefix_caching=not self.surface.num_slots,
            block_size=self.surface.block_size,
            max_model_len=MAX_LEN,
            max_num_seqs=1 if alone else 6,
            max_num_batched_tokens=options.get("budget", 64),
            speculation=options.get("speculation"),
        )
        scheduler = Scheduler(limits, LinearStepTime())
        runner = VllmRunner(limits, self.surface, self.model, DeviceConfig(CPU, DTYPES[self.dtype], 1))
        runner.guides, runner.adapters = Guides(), self._adapters
        executor = ThreadExecutor(runner)
        adapters = options.get("adapters", [None] * len(asked))
        needed = set(filter(None, adapters))
        for adapter in needed:
            executor.load_adapter(adapter, [each.number for each in needed]).result()
        depth = 1 if alone else self.depth
        engine = EngineCore(scheduler, executor, max_in_flight_steps=depth)
        got: dict[str, list[Any]] = {}
        left = list(enumerate(asked))
        aborted = [f"{self._run}-{index}" for index in options.get("aborted", ())]
        num_steps = 0
        while left or engine.has_work:
            if left and (not engine.has_work if alone else num_steps % 3 == 0):
                index, (prompt, sampling) = left.pop(0)
                name = f"{self._run}-{index}"
                got[name] = []
                engine.add(
                    Request(
                        request_id=name,
                        prompt_token_ids=prompt,
                        sampling=sampling,
                        adapter=adapters[index],
                        num_prompt_logprobs=options.get("num_prompt_logprobs"),
                    )
                )
            num_steps += 1
            made = engine.step()
            for output in () if made is None else made.outputs:
                got[output.request_id].append(output)
            engine.abort(name for name in aborted if len(got.get(name, ())) == 1)
        scheduler.check_invariants()
        engine.shutdown()
        return list(got.values()), scheduler

    def compare_steps(self) -> None:
        """Compare those of the start; raises where they differ."""
        limits = SchedulerConfig(
            policy="slo",
            num_blocks=self.num_blocks,
            enable_prefix_caching=not self.surface.num_slots,
            block_size=self.surface.block_size,
            max_model_len=MAX_LEN,
            max_num_seqs=6,
            max_num_batched_tokens=256,
        )
        runner = VllmRunner(limits, self.surface, self.model, DeviceConfig(CPU, DTYPES[self.dtype], 1))
        assert can_compare(runner)
        compare_steps(runner)


class Guides:
    """Guides over the model's vocabulary, whose first tokens are bytes and whose last one ends."""

    def __init__(self) -> None:
        size = SIZES["vocab_size"]
        texts = [bytes([byte]) for byte in range(256)] + [b""] * (size - 257) + [b"<end>"]
        self._compiler = GrammarCompiler(Vocabulary(texts, [size - 1], [size - 1], None), size)

    def guide(self, grammar: Grammar) -> Any:
        return self._compiler.compile(grammar)


def tokens(outputs: Sequence[Sequence[Any]]) -> list[list[int]]:
    return [[token for each in request for token in each.new_token_ids] for request in outputs]


def greedy(model: Any, asked: Sequence[tuple[tuple[int, ...], SamplingParams]]) -> list[list[int]]:
    """Return transformers' tokens."""
    with torch.inference_mode():
        return [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=sampling.max_tokens,
                do_sample=False,
            )[0, len(prompt) :].tolist()
            for prompt, sampling in asked
        ]


def own(bench: Bench, asked: Sequence[tuple[tuple[int, ...], SamplingParams]]) -> list[list[int]]:
    """Return the tokens of vLLM's own scheduler, one request after the other."""
    from vllm.v1.request import Request as Theirs

    core = bench.surface._core
    answers: list[list[int]] = []
    for index, (prompt, sampling) in enumerate(asked):
        core.add_request(Theirs(f"own-{index}", list(prompt), sampling_params(sampling, None), None))
        answers.append(ids := [])
        while core.scheduler.has_unfinished_requests():
            made = core.step_fn()[0] if hasattr(core, "step_fn") else core.step()[0]
            ids += [
                token for each in (made or {}).values() for one in each.outputs for token in one.new_token_ids
            ]
    return answers


def main(name: str, folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    family, model = FAMILIES[name], make_model(name, folder)
    bench = Bench(folder, 1 if family.has_state else 2, family.dtype, **options)
    bench.compare_steps()
    rng = random.Random(2)
    plain = [(each, SamplingParams(temperature=0.0, max_tokens=rng.randrange(5, 60))) for each in prompts(12)]
    expected = greedy(model, plain) if family.is_exact else own(bench, plain)
    found: dict[str, Any] = {"prefix_hits": 0, "preemptions": 0, "has_state": bool(bench.surface.num_slots)}

    def ways(asked: Sequence[tuple[tuple[int, ...], SamplingParams]]) -> dict[str, list[list[int]]]:
        alone, _ = bench.serve(asked, alone=True)
        together, _ = bench.serve(asked)
        short, scheduler = bench.serve(asked, num_blocks=MAX_LEN // bench.surface.block_size + 2)
        found["preemptions"] += scheduler.table.num_preemptions
        found["prefix_hits"] += scheduler.table.num_prefix_hits
        return {"alone": tokens(alone), "together": tokens(together), "short": tokens(short)}

    def equal(got: Mapping[str, list[list[int]]], wanted: list[list[int]]) -> dict[str, int]:
        return {way: sum(map(list.__eq__, ids, wanted)) for way, ids in got.items()}

    found["num_asked"] = len(plain)
    found["greedy"] = equal(ways(plain), expected)
    penalties: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    asked = [(prompt, replace(sampling, **penalties)) for prompt, sampling in plain]
    got = ways(asked)
    found["penalties"] = equal(got, got["alone"])
    found["penalties_differ"] = got["alone"] != expected
    drawn: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 3}
    asked = [(prompt, replace(sampling, **drawn)) for prompt, sampling in plain]
    outputs, _ = bench.serve(asked)
    found["drawn"] = sum(
        len(ids) == sampling.max_tokens for ids, (_, sampling) in zip(tokens(outputs), asked, strict=True)
    )
    scored = SamplingParams(temperature=0.0, max_tokens=6, num_logprobs=3)
    asked = [(prompt, scored) for prompt in prompts(4)]
    outputs, _ = bench.serve(asked, num_prompt_logprobs=2)
    found["logprob_errors"] = errors(model, asked, outputs)
    found["choices"], found["stopped"] = choices(bench, plain[:3], expected), stopped(bench, plain, expected)
    words = Grammar.of("start: /(a|b)(c|d)(e|f)/")
    guided, free = (SamplingParams(seed=3, max_tokens=12, grammar=each) for each in (words, None))
    asked = [
        (prompt, replace(guided if index % 2 else free, temperature=temperature))
        for temperature in (0.0, 1.0)
        for index, prompt in enumerate(prompts(6))
    ]
    outputs, _ = bench.serve(asked)
    found["guided"] = [
        [*ids, outputs[index][-1].finish_reason] for index, ids in enumerate(tokens(outputs)) if index % 2
    ]
    return found


def choices(bench: Bench, asked: Any, expected: list[list[int]]) -> list[int]:
    """Ask each thing four times at once, as `n` does; return how many of the answers are as expected."""
    outputs, scheduler = bench.serve([each for each in asked for _ in range(4)])
    wanted = [each for each in expected[: len(asked)] for _ in range(4)]
    return [sum(map(list.__eq__, tokens(outputs), wanted)), len(wanted), scheduler.table.num_prefix_hits]


def stopped(bench: Bench, asked: Any, expected: list[list[int]]) -> list[bool]:
    """End answers at their fourth token, and each third request after its first; return what is as it was."""
    stops = [
        (prompt, replace(each, stop_token_ids=(ids[3],)))
        for (prompt, each), ids in zip(asked, expected, strict=True)
    ]
    outputs, _ = bench.serve(stops, aborted=range(0, len(stops), 3))
    return [
        len(ids) <= 2 if index % 3 == 0 else (ids == wanted[: wanted.index(wanted[3]) + 1])
        for index, (ids, wanted) in enumerate(zip(tokens(outputs), expected, strict=True))
    ]


def errors(model: Any, asked: Any, outputs: Any) -> tuple[float, float]:
    """Return the largest error of log-probabilities of outputs, and of prompts."""
    worst, worst_prompt = 0.0, 0.0
    for (prompt, _), request in zip(asked, outputs, strict=True):
        ids = [token for each in request for token in each.new_token_ids]
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
        said = [each for output in request for each in output.logprobs or ()]
        assert [each.token_id for each in said] == ids, "one for each token"
        for place, each in enumerate(said):
            line = logits[len(prompt) - 1 + place]
            pairs = zip((each.token_id, *each.top_token_ids), (each.logprob, *each.top_logprobs), strict=True)
            worst = max(worst, *(abs(float(line[token]) - value) for token, value in pairs))
            assert len(each.top_token_ids) == 3
        reports = [each for output in request for each in output.prompt_logprobs or ()]
        assert [each.token_id for each in reports] == list(prompt[1:]), "one for each token but the first"
        for place, each in enumerate(reports):
            worst_prompt = max(worst_prompt, abs(float(logits[place][each.token_id]) - each.logprob))
    return worst, worst_prompt


if __name__ == "__main__":
    name, place, *rest = sys.argv[1:]
    print("RESULT " + json.dumps(main(name, Path(place), json.loads("".join(rest) or "{}"))))  # noqa: T201
