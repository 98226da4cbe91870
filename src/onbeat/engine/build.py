"""From a configuration to a running engine: model, step-time model, scheduler, step loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

from onbeat import __version__
from onbeat.core.errors import ConfigError
from onbeat.core.protocols import EngineInfo
from onbeat.engine.core import EngineCore
from onbeat.engine.device import DeviceConfig
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.executor import ThreadExecutor
from onbeat.engine.footprint import short_memory_in_words
from onbeat.engine.grammar_port import GrammarPort
from onbeat.engine.load import LoadedModel, prepare_model
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.objective_watch import ObjectiveWatch
from onbeat.engine.pooling import choose_pooling
from onbeat.engine.progress import OnProgress
from onbeat.engine.stand_in.load import prepare_stand_in, stand_in_step_time
from onbeat.engine.step_time_source import StepTime, choose_step_time
from onbeat.engine.step_time_spec import precision_of
from onbeat.engine.weights.digests import unchanged
from onbeat.recording.log import RecordHeader
from onbeat.recording.writer import create_record
from onbeat.scheduler.replica.idle_check import IdleCheck
from onbeat.scheduler.replica.policies import composition
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.text.sampling_defaults import sampling_defaults

_SWITCH_SECONDS = 2e-4
"""Between threads of the interpreter: at its 5 ms one that plans would hold up another that launches."""


class Loader(Protocol):
    """Has refused whatever can be, and loaded nothing large."""

    @property
    def device(self) -> DeviceConfig: ...

    @property
    def limits(self) -> SchedulerConfig: ...

    def load(self, on_progress: OnProgress) -> LoadedModel: ...


_ChooseStepTime = Callable[[str, LoadedModel, OnProgress], StepTime]
SOURCES: Mapping[str, tuple[Callable[[EngineConfig], Loader], _ChooseStepTime]] = {
    "auto": (prepare_model, choose_step_time),
    "dummy": (prepare_model, choose_step_time),
    "stand-in": (prepare_stand_in, stand_in_step_time),
}
"""Load format -> where the model comes from, and what predicts its steps."""


def build_engine(config: EngineConfig, on_progress: OnProgress) -> tuple[EngineCore, EngineInfo]:
    """Load the model and put an engine around it.

    Raises
    ------
    ConfigError : the model cannot be loaded, or limits and memory do not go together.
    """
    prepare, predict = SOURCES[config.load_format]
    with unchanged(config.model) as digests:
        loader = prepare(config)
        _check_predictions(config, loader)
        chosen = config.generation_config, config.override_generation_config
        defaults = sampling_defaults(config.model.path, *chosen)
        start_record = create_record(config.record) if config.record else None
        with short_memory_in_words(loader.device.device):
            loaded = loader.load(on_progress)
            loaded = replace(loaded, limits=replace(loaded.limits, window_tokens=config.window_tokens))
            step_time = predict(config.step_time_profile, loaded, on_progress)
    objectives = _watch_objectives(config, loaded, step_time, on_progress)
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
        config.model.path, loaded.config.vocab_size, spells=config.speculative is not None
    )
    core = EngineCore(
        Scheduler(loaded.limits, step_time.model),
        ThreadExecutor(runner, on_shutdown=partial(_close, runner)),
        max_in_flight_steps=max_in_flight_steps,
        recorder=recorder,
        idle_work=partial(_touch_ahead, runner),
        judges=[judge for judge in (step_time.watch, objectives) if judge is not None],
        reports_load=config.reports_load,
        kv_memory=partial(loaded.kv_memory, config.activation_quantization) if info.moves_streams else None,
        grammars=grammars,
    )
    return core, info


def _touch_ahead(runner: ModelRunner) -> bool:
    """Take a little of the memory that later steps will need; return whether there was any to take."""
    proposer = runner.proposer
    return runner.forward.touch_ahead() or (proposer is not None and proposer.touch_ahead())


def _close(runner: ModelRunner) -> None:
    """Let go of what steps ran on."""
    if runner.proposer is not None:
        runner.proposer.close()
    runner.forward.close()


def _check_predictions(config: EngineConfig, loader: Loader) -> None:
    """Say before the weights are read that something will lack the step times that it plans with."""
    why, cure = None, ""
    if config.step_time_profile == "none":
        why, cure = "the step-time profile is 'none'", "leave --step-time-profile out, or "
    elif precision_of(loader.device.dtype) is None:
        dtype = loader.device.dtype.name
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


def _watch_objectives(
    config: EngineConfig, loaded: LoadedModel, step_time: StepTime, on_progress: OnProgress
) -> ObjectiveWatch | None:
    """Say how fast the engine is, and which objectives are out of reach; return who goes on watching."""
    if step_time.model is None:
        return None
    short, long = (min(num_tokens, loaded.limits.max_model_len) for num_tokens in (128, 1024))
    check = IdleCheck(short=short, long=long, context=long)
    on_progress(f"speed: {check.speeds(step_time.model)} ({step_time.origin})")
    if not config.slo_classes:
        return None
    watch = ObjectiveWatch(check, step_time.model, config.slo_classes)
    doubt = " (as measured while the machine was busy)" if step_time.was_busy else ""
    misses = watch.misses()
    for miss in misses:
        on_progress(miss + doubt)
    if misses:
        on_progress("requests with such an objective will be late: allow more time, or serve a smaller model")
    return watch


def _describe(loaded: LoadedModel, config: EngineConfig, digests: Mapping[str, str]) -> EngineInfo:
    limits = loaded.limits
    return EngineInfo(
        model_name=loaded.name,
        architecture=loaded.config.architecture,
        vocab_size=loaded.config.vocab_size,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        policy=limits.policy,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        device=loaded.device_name,
        dtype=loaded.device.dtype.name,
        priority_scheduling=limits.scheduling_policy == "priority",
        speculation=None if config.speculative is None else config.speculative.method,
        pooling=choose_pooling(config.pooling, loaded.config),
        embedding_size=loaded.config.hidden_size,
        generates=loaded.config.has_head,
        moves_streams=loaded.gives_kv and not composition(limits.policy).release.holds_finished,
        file_digests=digests,
    )


def _record_header(loaded: LoadedModel, info: EngineInfo, *, max_in_flight_steps: int) -> RecordHeader:
    engine = {**asdict(info), "threads": loaded.device.num_threads, **loaded.runner.forward.settings}
    if loaded.proposer is not None:
        engine["drafts"] = loaded.proposer.description
    return RecordHeader(
        onbeat_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        scheduler=asdict(loaded.limits),
        engine=engine,
        max_in_flight_steps=max_in_flight_steps,
    )
