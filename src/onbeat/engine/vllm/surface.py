"""Every call of vLLM that the engine uses, in one place: what else its versions change does not matter.

Its configuration by `EngineArgs`; memory, KV cache and warm-up by `EngineCore`; steps by `execute_model` and
`sample_tokens` of its executor; `NewRequestData`, `CachedRequestData`, `SchedulerOutput`, `GrammarOutput` and
`SamplingParams` for what a step says, `ModelRunnerOutput` for what comes of it; `MambaSpec` for layers.

That includes what users and requests ask of vLLM, in its words.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from onbeat.core.errors import ConfigError
from onbeat.core.request import Adapter, Request, SamplingParams
from onbeat.engine.device import DeviceConfig
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.model_config.architecture import NO_ROPE, Experts, ModelConfig
from onbeat.engine.vllm.faults import Made, Workers, reason, with_cure
from onbeat.hub.files import ModelFiles
from onbeat.scheduler.scheduler_config import DEFAULT_BLOCK_SIZE
from onbeat.speculative_config import SpeculativeConfig

_CPU_BLOCK = 32
"""Tokens: vLLM's attention on CPUs takes blocks of multiples of this."""


class Settings:
    """How vLLM is to run a model: its own configuration, of which nothing large is loaded yet.

    Parameters
    ----------
    arguments : fields of vLLM's `EngineArgs`.
    threads : CPU threads; None leaves them to vLLM.

    Raises
    ------
    ConfigError : vLLM does not take the model, or an argument; with its own reason.
    """

    def __init__(self, arguments: Mapping[str, Any], threads: int | None) -> None:
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if threads is not None:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        # A fork would copy locks that other threads hold.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        self.version = _version()
        self._arguments = {"disable_hybrid_kv_cache_manager": True, **arguments}
        self.config = self.make()
        """As it is before anything is taken on."""
        if self.config.model_config.is_hybrid:  # whose layers without attention have blocks of their own
            # With two steps in flight some answers of Qwen3-Next were wrong from their first token on.
            self.take(disable_hybrid_kv_cache_manager=False, async_scheduling=False)
        if self.config.parallel_config.pipeline_parallel_size > 1:
            self.take(async_scheduling=False)  # each step tells the first stage what the last one sampled

    def take(self, **arguments: Any) -> None:
        """Change some arguments of the configuration that is made next."""
        self._arguments |= arguments

    def make(self) -> Any:
        """Return a `VllmConfig`, which takes vLLM up to a second.

        Raises
        ------
        ConfigError : vLLM does not take the arguments; with its own reason.
        """
        from vllm.engine.arg_utils import EngineArgs

        try:
            return EngineArgs(**self._arguments).create_engine_config()
        except Exception as error:  # of any kind: a damaged config.json may be a KeyError
            raise ConfigError(f"vLLM {self.version} does not run this: {reason(error)}") from error


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def start_executor(settings: Settings) -> VllmExecutor:
    """Make vLLM's executor with its KV cache.

    Raises
    ------
    ConfigError : vLLM does not take the settings, or cannot load the model; with its own reason.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    config = settings.make()
    workers = Workers()
    failed: list[bool] = []
    core = EngineCore.__new__(EngineCore)  # so that its workers can be ended where its constructor fails
    try:
        with workers.starting(has_some=has_workers(config)):
            # Its constructor measures the memory, makes the KV cache of each kind of layer and warms up:
            # there is no other way. Its scheduler stays idle.
            core.__init__(
                config,
                Executor.get_class(config),
                log_stats=False,
                executor_fail_callback=lambda: failed.append(True),
            )
        if config.parallel_config.distributed_executor_backend == "mp":
            workers.bind(core.model_executor.collective_rpc)
        return VllmExecutor(core, config, workers, failed)
    except Exception as error:
        if (executor := getattr(core, "model_executor", None)) is not None:  # which fails behind its start
            workers.end(executor.shutdown)
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"vLLM {settings.version} cannot start: {with_cure(error)}") from error


class VllmExecutor:
    """vLLM's executor, as a runner of steps needs it.

    Parameters
    ----------
    core : vLLM's engine core, of which the executor is used.
    config : its `VllmConfig`.
    workers : its processes, where it has some.
    failed : not empty once one has died.
    """

    def __init__(self, core: Any, config: Any, workers: Workers, failed: Sequence[bool]) -> None:
        self._core, self.config, self._workers, self._failed = core, config, workers, failed
        self._begun: Any = None
        self._waiting = threading.Lock()
        """Held to wait for workers: their answers come in one queue, which two threads would mix up."""
        self.version = _version()
        self._executor = core.model_executor
        self.is_second_runner = bool(getattr(config, "use_v2_model_runner", False))
        self.overlaps = bool(config.scheduler_config.async_scheduling)
        self.has_stages = config.parallel_config.pipeline_parallel_size > 1
        """Whether the workers that read tokens are not those that sample them."""
        self.num_blocks = int(config.cache_config.num_gpu_blocks)
        self.block_size = int(config.cache_config.block_size)
        self.graphs = (
            None if config.device_config.device_type == "cpu" else _graphs(config.compilation_config)
        )
        """What is captured of steps; None where nothing can be."""
        self.num_drafts = int(getattr(config.speculative_config, "num_speculative_tokens", 0))
        """Most drafts of a request that its steps make for the next one."""
        self.most_blocks = -(-int(config.model_config.max_model_len) // self.block_size)
        """Of a request that vLLM has room for."""
        self.takes_seeds = config.device_config.device_type != "cpu"
        self.pools = config.model_config.runner_type == "pooling"
        """Whether requests become embeddings."""
        if self.pools and "embed" not in (tasks := self._executor.supported_tasks):
            raise ConfigError(
                f"vLLM makes no embeddings with this model; it does: {', '.join(tasks) or 'nothing'}"
            )
        self.kinds = _kinds(core.scheduler.kv_cache_config)
        self.num_slots = int(config.scheduler_config.max_num_seqs) if False in self.kinds else 0
        """Requests that have state beside their KV blocks."""

    def begin(self, step: Any) -> bool:
        """Begin a step; return whether it has tokens."""
        self._begun = self._executor.execute_model(step, non_block=True)
        if not step.total_num_scheduled_tokens:
            with self._waiting:
                self._begun.result()
            return False
        return True

    def sample(self, grammar: Any = None) -> Any:
        """Let tokens of the step that was begun be sampled; return the future of what comes of it."""
        executor, begun = self._executor, self._begun
        made = begun if self.pools else executor.sample_tokens(grammar, non_block=True)
        return Made(begun, made, self._waiting)

    @property
    def has_failed(self) -> bool:
        """Whether a worker has died; vLLM says so before it gives up the step."""
        return bool(self._failed) or bool(getattr(self._executor, "is_failed", False))

    def take_drafts(self) -> dict[str, list[int]]:
        """Return the drafts that the newest step has made, by request; call it when that is done.

        The second runner keeps them, and tells only how many there are.
        """
        made = self._executor.take_draft_token_ids()
        if made is None:
            return {}
        return {
            name: list(ids) if self.is_second_runner else [int(each) for each in ids if each >= 0]
            for name, ids in zip(made.req_ids, made.draft_token_ids, strict=True)
        }

    @property
    def num_state_blocks(self) -> int:
        """Blocks that hold the state of layers without attention, behind those that are given out."""
        return self.num_slots * self.kinds.count(False)

    @property
    def num_kv_blocks(self) -> int:
        """Blocks that are given out: each group of layers with keys and values has so many of its own."""
        if not self.kinds:  # no layer keeps anything: as many as one may want
            longest = -(-int(self.config.model_config.max_model_len) // self.block_size)
            return int(self.config.scheduler_config.max_num_seqs) * longest
        return (self.num_blocks - self.num_state_blocks) // max(self.kinds.count(True), 1)

    def blocks(
        self, block_ids: Sequence[int], slot: int | None, *, is_new: bool = True
    ) -> tuple[list[int], ...]:
        """Return a request's blocks for each group of layers.

        Parameters
        ----------
        slot : of its state; None where there is none.
        is_new : whether vLLM has not been told of its state.
        """
        start, state = 0, self.num_blocks - self.num_state_blocks + (slot or 0)
        found: list[list[int]] = []
        for has_kv in self.kinds:
            if has_kv:
                found.append([start + each for each in block_ids] if start else list(block_ids))
                start += self.num_kv_blocks
            else:
                found.append([state] if is_new else [])
                state += self.num_slots
        return tuple(found)

    def close(self) -> None:
        """End the workers."""
        self._workers.end(self._core.shutdown)

    def no_cached_requests(self) -> Any:
        """Return vLLM's list of requests that it knows, empty."""
        from vllm.v1.core.sched.output import CachedRequestData

        return CachedRequestData.make_empty()

    def new_request(
        self,
        request: Request,
        output_token_ids: Sequence[int],
        blocks: tuple[list[int], ...],
        num_computed_tokens: int,
    ) -> Any:
        """Return what vLLM is told of a request that it does not know."""
        from vllm import PoolingParams
        from vllm.v1.core.sched.output import NewRequestData

        prompt = list(request.prompt_token_ids)
        tokens = [*prompt, *output_token_ids]
        return NewRequestData(
            req_id=request.request_id,
            # The first runner has no field for tokens that came elsewhere: they are a prompt to it.
            prompt_token_ids=prompt if self.is_second_runner else tokens,
            mm_features=[],
            sampling_params=None
            if self.pools
            else sampling_params(request.sampling, request.num_prompt_logprobs, takes_seeds=self.takes_seeds),
            # Neither cut nor normalised, which onbeat does.
            pooling_params=PoolingParams(task="embed", use_activation=False) if self.pools else None,
            block_ids=blocks,
            num_computed_tokens=num_computed_tokens,
            lora_request=None if request.adapter is None else lora_request(request.adapter),
            prefill_token_ids=tokens,
        )

    def add_adapter(self, adapter: Adapter) -> None:
        """Load a LoRA adapter.

        Raises
        ------
        ConfigError : it cannot be loaded; with vLLM's own reason.
        """
        told = f"the LoRA adapter {adapter.name!r} ({adapter.path}) cannot be loaded"
        if not (Path(adapter.path).expanduser() / "adapter_config.json").is_file():
            raise ConfigError(f"{told}: the folder has no adapter_config.json; give the folder of an adapter")
        try:
            with self._waiting:
                self._executor.add_lora(lora_request(adapter))
        except Exception as error:
            raise ConfigError(f"{told}: {reason(error)}") from error

    def remove_adapter(self, number: int) -> None:
        """Let go of a LoRA adapter that no request has any more."""
        with self._waiting:
            self._executor.remove_lora(number)

    def step(
        self,
        new: Sequence[Any],
        cached: Any,
        num_tokens: dict[str, int],
        finished: set[str],
        preempted: set[str],
        drafts: dict[str, list[int]],
    ) -> Any:
        """Return vLLM's `SchedulerOutput`."""
        from vllm.v1.core.sched.output import SchedulerOutput

        step = SchedulerOutput.make_empty()
        step.scheduled_new_reqs, step.scheduled_cached_reqs = list(new), cached
        step.num_scheduled_tokens, step.total_num_scheduled_tokens = num_tokens, sum(num_tokens.values())
        step.scheduled_spec_decode_tokens = drafts
        step.num_spec_tokens_to_schedule = self.num_drafts  # that it makes for the next step
        step.finished_req_ids, step.preempted_req_ids = finished, preempted
        if self.num_slots:  # vLLM's kernels beside a state read blocks that are not yet full
            given = [*(each.block_ids for each in new), *filter(None, cached.new_block_ids)]
            step.new_block_ids_to_zero = [
                block
                for groups in given
                for block_ids, has_kv in zip(groups, self.kinds, strict=True)
                if has_kv
                for block in block_ids
            ]
        return step

    def grammar(self, names: Sequence[str], bitmask: Any) -> Any:
        """Return masks of some rows, in vLLM's words."""
        from vllm.v1.core.sched.output import GrammarOutput

        return GrammarOutput(list(names), bitmask)


def _graphs(compilation: Any) -> str:
    """Return whether steps are captured, and the numbers of tokens that they are padded to."""
    sizes = sorted(compilation.cudagraph_capture_sizes or ())
    return f"cuda, steps of {' '.join(map(str, sizes))} tokens" if sizes else "none"


def lora_request(adapter: Adapter) -> Any:
    """Return a LoRA adapter in vLLM's words: two of one name are the same to it, whatever their numbers."""
    from vllm.lora.request import LoRARequest

    path = str(Path(adapter.path).expanduser())
    return LoRARequest(f"{adapter.name}#{adapter.number}", adapter.number, path)


def _kinds(kv_cache_config: Any) -> tuple[bool, ...]:
    """Return for each group of layers whether its blocks hold keys and values; False: they hold a state.

    Raises
    ------
    ConfigError : groups have blocks of other sizes.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    groups = kv_cache_config.kv_cache_groups
    kinds = tuple(not isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
    sizes = {group.kv_cache_spec.block_size for group, has_kv in zip(groups, kinds, strict=True) if has_kv}
    if len(sizes) > 1:
        raise ConfigError(
            f"vLLM keeps this model's KV in blocks of {sorted(sizes)} tokens, but onbeat has one size"
        )
    return kinds


def settings_of(config: EngineConfig, device: DeviceConfig, draft: ModelFiles | None) -> Settings:
    """Return vLLM's configuration of what the user asked for; raises as `Settings`.

    Parameters
    ----------
    draft : as of `speculation_of`.
    """
    limits, is_cpu = config.limits, device.device.type == "cpu"
    least = _CPU_BLOCK if is_cpu else 1
    arguments = {
        "model": str(config.model.path),
        "served_model_name": config.model.name,
        "skip_tokenizer_init": True,
        "dtype": device.dtype.name,
        "load_format": "dummy" if config.load_format == "dummy" else "auto",
        "seed": config.seed,
        "max_model_len": limits.max_model_len,
        "block_size": -(-(limits.block_size or DEFAULT_BLOCK_SIZE) // least) * least,
        "max_num_seqs": limits.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": False,  # onbeat's own
        "async_scheduling": not is_cpu if config.async_scheduling is None else config.async_scheduling,
    }
    if config.num_loras:
        arguments |= lora_arguments(config.num_loras, config.max_lora_rank, is_cpu=is_cpu)
    if not is_cpu:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        arguments["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes
    if config.pooling != "auto":
        arguments["pooler_config"] = {"seq_pooling_type": config.pooling.upper()}
    if config.speculative is not None:
        arguments["speculative_config"] = speculation_of(config.speculative, draft)
        arguments["async_scheduling"] = False  # a step is planned with the drafts of the one before
    arguments |= read_arguments(config.vllm_arguments)
    threads = max(device.num_threads // config.tensor_parallel_size, 1)
    return Settings(arguments, threads if is_cpu else None)


def left_out(settings: Settings) -> dict[str, str]:
    """Return the fields of `SamplingParams` that vLLM would leave out in silence, and why."""
    config = settings.config
    if config.speculative_config is None or getattr(config, "use_v2_model_runner", False):
        return {}
    why = f"vLLM {settings.version} leaves it out where its first model runner verifies drafts"
    return dict.fromkeys(("min_p", "logit_bias"), why)


def has_workers(config: Any) -> bool:
    """Return whether other processes compute."""
    return str(config.parallel_config.distributed_executor_backend) != "uni"


def why_whole(settings: Settings) -> str | None:
    """Return why prompts cannot be computed in chunks; None where they can."""
    model = settings.config.model_config
    pooler = model.pooler_config
    if pooler is None or model.is_chunked_prefill_supported:
        return None
    return f"it pools their tokens by {pooler.seq_pooling_type} over {model.attn_type} attention"


def lora_arguments(number: int, max_rank: int, *, is_cpu: bool) -> dict[str, Any]:
    """Return arguments by which vLLM has room for LoRA adapters.

    Parameters
    ----------
    number : of adapters.
    is_cpu : whether a request without an adapter gets the one in the last place: on CPUs vLLM looks it up at
        -1. That place stays empty here, as an adapter takes the first free one.
    """
    room = number + 1 if is_cpu else number
    return {"enable_lora": True, "max_loras": room, "max_cpu_loras": room, "max_lora_rank": max_rank}


def model_config_of(settings: Settings) -> ModelConfig:
    """Return the sizes of a model, as far as step times and requests are about them."""
    model, parallel = settings.config.model_config, settings.config.parallel_config
    text = model.hf_text_config
    hidden, heads = int(model.get_hidden_size()), int(model.get_num_attention_heads(parallel))
    num_experts = int(model.get_num_experts() or 0)
    width = getattr(text, "intermediate_size", None) or 4 * hidden
    experts = None
    if num_experts:
        experts = Experts(
            num_experts=num_experts,
            num_per_token=int(model.get_num_experts_per_tok()),
            intermediate_size=int(getattr(text, "moe_intermediate_size", None) or width),
        )
    return ModelConfig(
        family="vllm",
        architecture=model.architecture,
        vocab_size=int(model.get_vocab_size()),
        hidden_size=hidden,
        num_layers=int(model.get_num_layers(parallel)),
        num_heads=heads * parallel.tensor_parallel_size,
        num_kv_heads=int(model.get_total_num_kv_heads()),
        head_dim=int(model.get_head_size()),
        intermediate_size=int(width),
        max_position_embeddings=int(model.max_model_len),
        rms_norm_eps=1e-6,
        rope=NO_ROPE,
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        experts=experts,
        dtype=str(model.dtype).removeprefix("torch."),
        has_head=model.runner_type == "generate",
        pooling=None if model.pooler_config is None else str(model.pooler_config.seq_pooling_type).lower(),
    )


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the fields of vLLM's `EngineArgs` that flags of its command line set.

    Raises
    ------
    ConfigError : vLLM does not take a flag or its value; with its own reason.
    """
    if not arguments:
        return {}
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Flags(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"vLLM {vllm.__version__} does not take what stands behind `--`: {message}")

    parser = EngineArgs.add_cli_args(Flags(prog="vllm", add_help=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # so that it is known which were given
    return dict(vars(parser.parse_args(list(arguments))))


def speculation_of(speculative: SpeculativeConfig, draft: ModelFiles | None) -> dict[str, Any]:
    """Return what makes drafts, in vLLM's words.

    Parameters
    ----------
    draft : where the weights lie that make them; None where no others than the model's do.
    """
    theirs: dict[str, Any] = {
        "method": speculative.method.replace("-", "_"),
        "num_speculative_tokens": speculative.num_speculative_tokens,
    }
    if draft is not None:
        theirs["model"] = str(draft.path)
    if speculative.method == "ngram":
        theirs["prompt_lookup_max"] = speculative.prompt_lookup_max
        theirs["prompt_lookup_min"] = speculative.prompt_lookup_min
    return theirs


_ALIKE = (
    *("temperature", "top_k", "top_p", "min_p", "min_tokens", "max_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields of `SamplingParams` that vLLM calls and takes the same."""


def sampling_params(
    params: SamplingParams, num_prompt_logprobs: int | None, *, takes_seeds: bool = True
) -> Any:
    """Return how tokens are chosen, in vLLM's words; where a request ends is onbeat's to say.

    Parameters
    ----------
    takes_seeds : False where vLLM fails with a seed: on a CPU, at a chunk of a prompt.
    """
    from vllm import SamplingParams as Theirs

    theirs = Theirs(
        **{name: getattr(params, name) for name in _ALIKE},
        seed=params.seed if takes_seeds else None,
        logit_bias=dict(params.logit_bias) or None,
        allowed_token_ids=list(params.allowed_token_ids) or None,
        stop_token_ids=list(params.stop_token_ids),
        logprobs=params.num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
        logprob_token_ids=list(params.logprob_token_ids) or None,
    )
    theirs._bad_words_token_ids = [list(each) for each in params.bad_words] or None
    return theirs
