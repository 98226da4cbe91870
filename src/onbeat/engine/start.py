"""From a configuration to a running engine: backend, limits, model, step times, step loop.

Whether this machine can meet the objectives of classes is said at start.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec

from onbeat.core.errors import ConfigError, NeedsVllm, counted
from onbeat.core.protocols import EngineInfo
from onbeat.engine.backends.base import Backend, CheckpointBackend, Room, SettleLimits
from onbeat.engine.backends.stand_in import StandInBackend
from onbeat.engine.backends.table import choose_backend, open_weights, vllm_backend, vllm_commands
from onbeat.engine.core import EngineCore
from onbeat.engine.device import detect_device, run_apart
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.executor import ThreadExecutor
from onbeat.engine.forward import ForwardPass
from onbeat.engine.grammar_port import GrammarPort
from onbeat.engine.loaded_model import LoadedModel
from onbeat.engine.memory import most_tokens, short_memory_in_words
from onbeat.engine.pooling import choose_pooling
from onbeat.engine.progress import Detail, OnProgress
from onbeat.engine.speculation.build import ProposerBuilder, choose_proposer
from onbeat.engine.speculation.proposer import Proposer
from onbeat.engine.step_time_spec import precision_of
from onbeat.engine.step_times import StepTime, choose_step_time
from onbeat.engine.weights.digests import unchanged
from onbeat.recording.log import RecordHeader
from onbeat.recording.writer import create_record
from onbeat.scheduler import scheduler_config
from onbeat.scheduler.replica.idle_check import IdleCheck
from onbeat.scheduler.replica.policies import composition
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.replica.token_budget import settle
from onbeat.text.sampling_defaults import sampling_defaults
from onbeat.version import __version__

_SWITCH_SECONDS = 2e-4
"""Between threads of the interpreter: at its 5 ms one that plans would hold up another that launches."""


def build_engine(config: EngineConfig, on_progress: OnProgress) -> tuple[EngineCore, EngineInfo]:
    """Load the model and put an engine around it.

    Raises
    ------
    ConfigError : the model cannot be loaded, or limits and memory do not go together.
    """
    with unchanged(config.model) as digests:
        loader = prepare(config)
        _check_predictions(config, loader)
        chosen = config.generation_config, config.override_generation_config
        defaults = sampling_defaults(config.model.path, *chosen)
        _check_defaults(defaults, loader.backend)
        start_record = create_record(config.record) if config.record else None
        with short_memory_in_words(loader.backend.device.device):
            loaded = loader.load(on_progress)
            loaded = replace(loaded, limits=replace(loaded.limits, window_tokens=config.window_tokens))
            step_time = choose_step_time(config.step_time_profile, loaded, on_progress)
    _say_speed(config, loaded, step_time, on_progress)
    if defaults:
        values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        on_progress(f"sampling defaults: {values} (--generation-config vllm takes none of the model's)")
    info = replace(_describe(loaded, config, digests), sampling_defaults=defaults)
    overlaps = loaded.runner.overlaps if config.async_scheduling is None else config.async_scheduling
    max_in_flight_steps = 2 if overlaps else 1
    if loaded.runner.overlaps:
        sys.setswitchinterval(_SWITCH_SECONDS)
    recorder = None
    if start_record is not None:
        header = _record_header(loaded, info, max_in_flight_steps=max_in_flight_steps)
        if step_time.description is not None:
            header = replace(header, step_time=step_time.description.as_json())
        recorder = start_record(header)
    runner = loaded.runner
    runner.guides = grammars = GrammarPort.of_model(
        config.model.path, loaded.backend.model.vocab_size, spells=config.speculative is not None
    )
    core = EngineCore(
        Scheduler(loaded.limits, step_time.model),
        ThreadExecutor(runner, on_shutdown=runner.close),
        max_in_flight_steps=max_in_flight_steps,
        recorder=recorder,
        idle_work=runner.touch_ahead,
        judge=None if step_time.watch is None else step_time.watch.judge,
        reports_load=config.reports_load,
        kv_memory=partial(loaded.kv_memory, config.activation_quantization)
        if info.limits.moves_streams
        else None,
        grammars=grammars,
    )
    return core, info


def _check_predictions(config: EngineConfig, loader: ModelLoader) -> None:
    """Say before the weights are read that something will lack the step times that it plans with."""
    why, cure = None, ""
    if config.step_time_profile == "none":
        why, cure = "the step-time profile is 'none'", "leave --step-time-profile out, or "
    elif precision_of(loader.backend.device.dtype) is None:
        dtype = loader.backend.device.dtype.name
        why, cure = f"no step-time model knows {dtype}", "choose another --dtype, or "
    if why is None:
        return
    speculation = loader.limits.speculation
    if composition(loader.limits.policy).needs_step_time:
        raise ConfigError(
            f"policy {loader.limits.policy!r} plans with predicted step times, but {why}; {cure}take a "
            "policy that plans without them: --policy sarathi (in Python: policy='sarathi')"
        )
    if speculation is not None and speculation.draft_length == "adaptive":
        raise ConfigError(
            f"draft_length 'adaptive' weighs drafts against predicted step times, but {why}; {cure}"
            '"draft_length": "fixed" in the speculative config'
        )


def _check_defaults(defaults: Mapping[str, int | float], backend: Backend) -> None:
    """Raise ConfigError where requests that state nothing would ask for what the engine cannot heed."""
    for name, why in backend.left_out.items():
        if defaults.get(name):
            raise ConfigError(
                f"{why}, but requests get {name} {defaults[name]:g} by the model's generation_config.json; "
                "give --generation-config vllm, which takes none of its defaults"
            )


def _say_speed(
    config: EngineConfig, loaded: LoadedModel, step_time: StepTime, on_progress: OnProgress
) -> None:
    """Say how fast the engine is, and which objectives are out of reach."""
    if step_time.model is None:
        return
    short, long = (min(num_tokens, loaded.limits.max_model_len) for num_tokens in (128, 1024))
    check = IdleCheck(short=short, long=long, context=long)
    on_progress(f"speed: {check.speeds(step_time.model)} ({step_time.origin})")
    doubt = " (as measured while the machine was busy)" if step_time.was_busy else ""
    misses = check.misses(step_time.model, config.slo_classes)
    for miss in misses:
        on_progress(miss + doubt)
    if misses:
        on_progress("requests with such an objective will be late: allow more time, or serve a smaller model")


def _describe(loaded: LoadedModel, config: EngineConfig, digests: Mapping[str, str]) -> EngineInfo:
    limits = loaded.limits
    return EngineInfo(
        model_name=loaded.backend.name,
        architecture=loaded.backend.model.architecture,
        vocab_size=loaded.backend.model.vocab_size,
        limits=limits.replica_limits(
            device=loaded.device_name,
            moves_streams=loaded.gives_kv and not composition(limits.policy).holds_finished,
        ),
        policy=limits.policy,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        dtype=loaded.backend.device.dtype.name,
        priority_scheduling=limits.scheduling_policy == "priority",
        speculation=None if config.speculative is None else config.speculative.method,
        pooling=choose_pooling(config.pooling, loaded.backend.model, loaded.backend.poolings),
        embedding_size=loaded.backend.model.hidden_size,
        embeds=loaded.backend.embeds,
        generates=loaded.backend.model.has_head,
        max_loras=config.num_loras,
        file_digests=digests,
        left_out=dict(loaded.backend.left_out),
    )


def _record_header(loaded: LoadedModel, info: EngineInfo, *, max_in_flight_steps: int) -> RecordHeader:
    about = asdict(info)
    about |= about.pop("limits")
    engine = {**about, "threads": loaded.backend.device.num_threads, **loaded.runner.forward.settings}
    if loaded.proposer is not None:
        engine["drafts"] = loaded.proposer.description
    return RecordHeader(
        onbeat_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        scheduler=asdict(loaded.limits),
        engine=engine,
        max_in_flight_steps=max_in_flight_steps,
    )


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Everything that can be refused has been, and nothing large is loaded."""

    config: EngineConfig
    backend: Backend
    proposer: ProposerBuilder | None
    limits: scheduler_config.SchedulerConfig
    settle: SettleLimits

    def load(self, say: OnProgress) -> LoadedModel:
        """Load the weights, make the KV cache, and run a first step.

        Raises
        ------
        ConfigError : a weight is missing or cannot be read.
        """
        backend, proposer = self.backend, self.proposer
        say(backend.headline())
        for line in backend.remarks(self.config):
            say(line)
        room = Room(self.settle, None if proposer is None else proposer.backend)
        propose = None if proposer is None else partial(_propose, proposer, say)
        start = partial(backend.start, self.limits, say, room, propose)
        runner, limits = start() if backend.has_workers else run_apart(start)
        if limits.max_num_seqs < self.config.limits.max_num_seqs:
            numbers = backend.model.state_numbers + limits.most_drafts * backend.model.draft_numbers
            say(
                f"at most {limits.max_num_seqs} requests run at once: the model keeps a state of "
                f"{4 * numbers / 2**20:.1f} MiB of each, and states take half of the KV "
                "cache's memory; --kv-cache-memory-bytes allows more"
            )
        longest = backend.model.max_position_embeddings
        cut = f" of the model's {longest:,}: --kv-cache-memory-bytes and --max-model-len allow more"
        is_cut = self.config.limits.max_model_len is None and limits.max_model_len < longest
        say(
            f"KV cache: room for {limits.num_blocks * limits.block_size:,} tokens; one request may have "
            f"{limits.max_model_len:,}{cut if is_cut else ''}"
        )
        if limits.num_tables > 1:
            num_requests = limits.num_requests(limits.max_model_len)
            say(
                f"sliding windows of {limits.window_length:,} tokens give KV back, in "
                f"{counted(limits.num_tables - 1, 'group')} of layers: room for {num_requests:,} of the "
                "longest requests"
            )
        say(
            Detail(
                f"{limits.num_blocks} blocks of {limits.block_size} tokens, policy {limits.policy}, "
                f"{limits.max_num_batched_tokens} tokens a step"
            )
        )
        backend.tell_excess(say)
        return LoadedModel(backend, limits, runner, self.proposer)


def prepare(config: EngineConfig) -> ModelLoader:
    """Choose a backend, and fit the limits to the memory that it has.

    Raises
    ------
    ConfigError : the model cannot be loaded, or limits and memory do not go together.
    """
    backend = _choose(config)
    block_size = config.limits.block_size or backend.block_size
    config = replace(config, limits=replace(config.limits, block_size=block_size))
    proposer = choose_proposer(config, backend)
    speculation = None
    if config.speculative is not None:
        speculation = config.speculative.for_scheduler(is_ahead=backend.drafts_ahead)
    asked = config
    if isinstance(backend, CheckpointBackend):
        draft = None if proposer is None else proposer.backend
        config = replace(config, limits=backend.bounded(config, draft))
    # What bounds steps that the user leaves open is no number of the user's.
    limits = replace(config.limits, max_num_batched_tokens=asked.limits.max_num_batched_tokens)
    own_settle = partial(settle, limits, model=backend.ahead(), most_tokens=most_tokens(config.limits))
    settle_limits = partial(_settle, own_settle, limits, backend.model.max_position_embeddings, speculation)
    fitted = backend.fit(config, settle_limits, None if proposer is None else proposer.backend)
    return ModelLoader(asked, backend, proposer, fitted, settle_limits)


def _choose(config: EngineConfig) -> Backend:
    if config.num_loras and (config.backend not in ("auto", "vllm") or config.load_format == "stand-in"):
        runs = "a stand-in" if config.load_format == "stand-in" else f"--backend {config.backend}"
        raise ConfigError(
            f"{runs} takes no LoRA adapters; serve with --backend vllm, or leave out --enable-lora, "
            "--lora-modules and --max-loras"
        )
    if config.load_format == "stand-in":
        return StandInBackend(config)
    device = detect_device(config.device, config.dtype, config.threads)
    if config.backend == "vllm":
        return vllm_backend(config, device, "as asked for")
    if config.vllm_arguments or config.num_loras:
        why = "whose flags are given" if config.vllm_arguments else "for LoRA adapters"
        return vllm_backend(config, device, why)
    try:
        checkpoint = open_weights(config)
        choose_pooling(config.pooling, checkpoint.config)
        return choose_backend(config, checkpoint, device)
    except NeedsVllm as error:
        if config.backend != "auto" or config.model.kind == "gguf":  # which vLLM does not read
            raise
        if find_spec("vllm") is None:
            cure = f"vLLM's workers may run it: {vllm_commands(config, device)}"
            raise NeedsVllm(f"{error}. {cure}") from error
        why = str(error).partition(";")[0]
        return vllm_backend(config, device, f"not by onbeat's own engines: {why}")


def _settle(
    settle: SettleLimits,
    limits: scheduler_config.SchedulerLimits,
    model_len: int,
    speculation: scheduler_config.SpeculationConfig | None,
    num_blocks: int,
    **windows: int,
) -> scheduler_config.SchedulerConfig:
    """Return limits that go with a number of KV blocks, or with fewer.

    Parameters
    ----------
    settle : `token_budget.settle`, with the limits and what is known of steps.
    windows : `num_tables` and `window_length`, where windows give KV back.
    """
    wanted_len = limits.max_model_len or model_len
    block_size = limits.block_size or scheduler_config.DEFAULT_BLOCK_SIZE
    if speculation is not None:
        wanted_len += speculation.num_lookahead_tokens
    # More blocks than every slot can fill would be memory for nothing.
    num_blocks = min(num_blocks, limits.max_num_seqs * -(-wanted_len // block_size))
    return settle(num_blocks=num_blocks, model_len=model_len, speculation=speculation, **windows)


def _propose(
    proposer: ProposerBuilder, say: OnProgress, forward: ForwardPass, limits: scheduler_config.SchedulerConfig
) -> Proposer:
    """Build what proposes drafts, and say what it is."""
    say(_describe_proposer(proposer, limits))
    return proposer.build(forward, limits)


def _describe_proposer(proposer: ProposerBuilder, limits: scheduler_config.SchedulerConfig) -> str:
    """Say what proposes drafts, how many, and what memory it takes of its own."""
    assert limits.speculation is not None
    most = limits.speculation.num_speculative_tokens
    length = {"adaptive": f"as many as the load makes worthwhile, at most {most}", "fixed": f"always {most}"}
    memory = "no weights or KV cache of its own"
    if (backend := proposer.backend) is not None:
        needs = backend.needs(limits.block_size)
        kv_bytes = limits.num_blocks * needs.block_bytes
        memory = f"{needs.weight_bytes / 2**20:.0f} MiB of weights and {kv_bytes / 2**20:.0f} MiB of KV cache"
    return (
        f"speculative decoding by {proposer.description}: drafts of a request in a step: "
        f"{length[limits.speculation.draft_length]}; {memory}"
    )
