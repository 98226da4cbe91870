"""From the options of a data set to its workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import orjson

from onbeat.bench.bench_config import DEFAULT_NUM_PROMPTS, DatasetConfig
from onbeat.core.errors import ConfigError, counted
from onbeat.files import read_text
from onbeat.workload.lengths import MOST_TOKENS, UniformLength, ZipfLength
from onbeat.workload.load_source import (
    CONVERSATION_OUTPUT_SIGMA,
    CONVERSATION_PROMPT_SIGMA,
    conversation_lengths,
)
from onbeat.workload.mixture import mix_in_long_prompts
from onbeat.workload.prompts import GivenPrompts, PromptWriter
from onbeat.workload.sharegpt import read_sharegpt, sharegpt_workload
from onbeat.workload.trace import Trace, read_trace
from onbeat.workload.workload import Workload, shared_prefix_workload, synthetic_workload, trace_workload

DEFAULT_OUTPUT_LEN = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTools:
    """What prompts are made and measured with."""

    writer: PromptWriter
    count_tokens: Callable[[str], int]


def load_workload(config: DatasetConfig, num_prompts: int | None, tools: PromptTools, seed: int) -> Workload:
    """Return the workload that a data set's options describe.

    Lengths depend on `seed` alone; words on the salt of `tools`.

    Raises
    ------
    ConfigError : a bad file, or fewer requests in it than asked for.
    """
    rng = np.random.default_rng([seed, 0])
    if config.name in {"azure", "mooncake", "burstgpt", "vidur", "lengths"}:
        return _from_trace(config, num_prompts, tools, rng)
    if config.name == "sharegpt":
        return _from_sharegpt(config, num_prompts, tools, rng)
    if config.name == "custom":
        return _from_custom(config, num_prompts, tools)
    num_requests = num_prompts or DEFAULT_NUM_PROMPTS
    if config.name == "prefix_repetition":
        return _prefix_repetition(config, num_requests, tools, rng)
    if config.name == "conversation":
        return _conversation(config, num_requests, tools, rng)
    if config.name == "zipf":
        return _zipf(config, num_requests, tools, rng)
    return _random(config, num_requests, tools, rng)


def _random(
    config: DatasetConfig, num_requests: int, tools: PromptTools, rng: np.random.Generator
) -> Workload:
    prompts = UniformLength(config.input_len, config.range_ratio)
    output_ratio = config.range_ratio if config.output_range_ratio is None else config.output_range_ratio
    outputs = UniformLength(config.output_len or DEFAULT_OUTPUT_LEN, output_ratio)
    if not config.prefix_len:
        workload = synthetic_workload(
            "random",
            num_requests=num_requests,
            prompt_lengths=prompts,
            output_lengths=outputs,
            writer=tools.writer,
            rng=rng,
        )
        if not config.long_share:
            return workload
        return mix_in_long_prompts(
            workload,
            share=config.long_share,
            num_tokens=config.long_input_len,
            writer=tools.writer,
        )
    return shared_prefix_workload(
        "random",
        num_prefix_tokens=config.prefix_len,
        groups=np.zeros(num_requests, dtype=np.int64),
        num_own_tokens=prompts.draw(num_requests, rng),
        max_tokens=outputs.draw(num_requests, rng),
        writer=tools.writer,
    )


def _conversation(
    config: DatasetConfig, num_requests: int, tools: PromptTools, rng: np.random.Generator
) -> Workload:
    prompt_mean = config.input_len
    output_mean = config.output_len or DEFAULT_OUTPUT_LEN
    return synthetic_workload(
        "conversation",
        num_requests=num_requests,
        prompt_lengths=conversation_lengths(prompt_mean, CONVERSATION_PROMPT_SIGMA),
        output_lengths=conversation_lengths(output_mean, CONVERSATION_OUTPUT_SIGMA),
        writer=tools.writer,
        rng=rng,
    )


def _zipf(config: DatasetConfig, num_requests: int, tools: PromptTools, rng: np.random.Generator) -> Workload:
    return synthetic_workload(
        "zipf",
        num_requests=num_requests,
        prompt_lengths=ZipfLength(exponent=config.zipf_exponent, high=config.input_len),
        output_lengths=ZipfLength(
            exponent=config.zipf_exponent, high=config.output_len or DEFAULT_OUTPUT_LEN
        ),
        writer=tools.writer,
        rng=rng,
    )


def _prefix_repetition(
    config: DatasetConfig, num_requests: int, tools: PromptTools, rng: np.random.Generator
) -> Workload:
    if num_requests < config.num_prefixes:
        raise ConfigError(f"{config.num_prefixes} prefixes need at least as many prompts, got {num_requests}")
    num_output = config.output_len or config.repetition_output_len
    groups = np.arange(num_requests, dtype=np.int64) % config.num_prefixes
    rng.shuffle(groups)
    return shared_prefix_workload(
        "prefix_repetition",
        num_prefix_tokens=config.repeated_prefix_len,
        groups=groups,
        num_own_tokens=np.full(num_requests, config.suffix_len, dtype=np.int64),
        max_tokens=np.full(num_requests, num_output, dtype=np.int64),
        writer=tools.writer,
    )


def _from_trace(
    config: DatasetConfig, num_prompts: int | None, tools: PromptTools, rng: np.random.Generator
) -> Workload:
    assert config.path is not None  # checked by the configuration
    trace = read_trace(config.path, kind=config.name)  # type: ignore[arg-type]
    if trace.times is None and config.shuffle:
        trace = trace.take(rng.permutation(len(trace)))
    num_requests = min(DEFAULT_NUM_PROMPTS, len(trace)) if num_prompts is None else num_prompts
    return trace_workload(
        _with_output_len(trace, config.output_len), num_requests=num_requests, writer=tools.writer
    )


def _with_output_len(trace: Trace, output_len: int | None) -> Trace:
    if output_len is None:
        return trace
    return replace(trace, num_output_tokens=np.full(len(trace), output_len, dtype=np.int64))


def _from_sharegpt(
    config: DatasetConfig, num_prompts: int | None, tools: PromptTools, rng: np.random.Generator
) -> Workload:
    assert config.path is not None
    exchanges = read_sharegpt(config.path)
    return sharegpt_workload(
        exchanges,
        num_requests=min(DEFAULT_NUM_PROMPTS, len(exchanges)) if num_prompts is None else num_prompts,
        output_len=config.output_len,
        count_tokens=tools.count_tokens,
        order=rng if config.shuffle else None,
    )


def _from_custom(config: DatasetConfig, num_prompts: int | None, tools: PromptTools) -> Workload:
    """Read JSON lines ``{"prompt": str, "output_tokens": int}``; the count may be left to --output-len."""
    assert config.path is not None
    prompts: list[str] = []
    outputs: list[int] = []
    for number, line in enumerate(read_text(config.path).splitlines(), start=1):
        if not line.strip():
            continue
        prompt, output = _parse_custom(config, number, line)
        prompts.append(prompt)
        outputs.append(output)
    if num_prompts is not None and num_prompts > len(prompts):
        raise ConfigError(
            f"{config.path} has {counted(len(prompts), 'prompt')}, and --num-prompts is {num_prompts}"
        )
    count = num_prompts or len(prompts)
    return Workload(
        name="custom",
        prompts=GivenPrompts(prompts[:count]),
        num_prompt_tokens=np.array(
            [tools.count_tokens(prompt) for prompt in prompts[:count]], dtype=np.int64
        ),
        max_tokens=np.array(outputs[:count], dtype=np.int64),
    )


def _parse_custom(config: DatasetConfig, number: int, line: str) -> tuple[str, int]:
    try:
        record = orjson.loads(line)
        prompt = record["prompt"]
        output = int(record.get("output_tokens", config.output_len or DEFAULT_OUTPUT_LEN))
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f'{config.path}, line {number}: expected {{"prompt": text, "output_tokens": count}}, '
            f"got {line[:80]!r}"
        ) from error
    if not isinstance(prompt, str) or not prompt or not 1 <= output <= MOST_TOKENS:
        raise ConfigError(
            f"{config.path}, line {number}: an empty prompt, or output_tokens that are not 1 to "
            f"{MOST_TOKENS:,}: {line[:80]!r}"
        )
    return prompt, output
