"""Requests that nobody has sent, by which steps are measured; beside `surface`, it knows vLLM's internals."""

from __future__ import annotations

import random
from typing import Any

from onbeat.perfmodel.profile import EngineValue
from onbeat.vllm.surface import EngineRequest, EngineScheduler

_BY_TEXT = ("ngram", "ngram_gpu", "suffix", "custom_class")
"""Methods of speculative decoding that find drafts in what was said; the others make as many for any text."""
_ORDINARY = (1000, 20_000)
"""Tokens that stand for text in any large vocabulary: special ones are at its ends."""


def hindrance(scheduler: EngineScheduler) -> str | None:
    """Return why made-up requests must not run in a server; None where they may."""
    config: Any = scheduler.vllm_config
    found: Any = scheduler
    if getattr(found, "connector", None) is not None or getattr(found, "ec_connector", None) is not None:
        return "a connector would hand made-up prompts to others"
    if int(getattr(config.parallel_config, "data_parallel_size", 1) or 1) > 1:
        return "data-parallel ranks run their steps together"
    method = getattr(getattr(config, "speculative_config", None), "method", None)
    if method in _BY_TEXT:
        return f"how many drafts {method} finds hangs on the text, and made-up text has next to none"
    return None


def settings(scheduler: EngineScheduler) -> dict[str, EngineValue]:
    """Return what vLLM is set to and step times hang on, beside model, device and version."""
    config: Any = scheduler.vllm_config
    compilation = getattr(config, "compilation_config", None)
    drafts: Any = getattr(config, "speculative_config", None)
    speculation: dict[str, EngineValue] = {}
    if drafts is not None:
        names = (drafts.method, drafts.num_speculative_tokens, getattr(drafts, "model", None))
        speculation["drafts"] = " ".join(str(each) for each in names)
    return speculation | {
        "max_num_batched_tokens": int(scheduler.max_num_scheduled_tokens),
        "max_num_seqs": int(config.scheduler_config.max_num_seqs),
        "cuda_graphs": str(getattr(compilation, "cudagraph_mode", None)),
        "capture_sizes": ",".join(str(size) for size in capture_sizes(scheduler)),
        "kv_dtype": str(getattr(getattr(config, "cache_config", None), "cache_dtype", "auto")),
        "is_eager": bool(getattr(config.model_config, "enforce_eager", False)),
    }


def capture_sizes(scheduler: EngineScheduler) -> list[int]:
    """Return the batch sizes for which vLLM has CUDA graphs: others are padded to the next."""
    compilation = getattr(scheduler.vllm_config, "compilation_config", None)
    return sorted(int(size) for size in getattr(compilation, "cudagraph_capture_sizes", None) or ())


class RequestMaker:
    """Makes requests of random tokens, which no prefix cache has.

    Parameters
    ----------
    seed : of the tokens.
    """

    def __init__(self, scheduler: EngineScheduler, seed: int) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        config: Any = scheduler.vllm_config
        manager: Any = scheduler.kv_cache_manager
        self._random = random.Random(seed)
        num_ids = int(config.model_config.get_vocab_size())
        low, high = _ORDINARY
        self._ids = range(low, min(high, num_ids)) if num_ids > 2 * low else range(num_ids // 2, num_ids)
        self._hasher = None
        if manager.enable_caching:
            hash_blocks = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            size = int(getattr(scheduler, "hash_block_size", config.cache_config.block_size))
            self._hasher = get_request_block_hasher(size, hash_blocks)

    def make(self, name: str, num_prompt: int, num_output: int) -> EngineRequest:
        """Return a request that ends for no other reason than its length."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        made: EngineRequest = Request(
            request_id=name,
            prompt_token_ids=self._random.choices(self._ids, k=num_prompt),
            sampling_params=SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=0.0),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        return made
