"""A model that can run steps, and what was decided on the way to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onbeat.engine.backends.base import Backend, Runner
from onbeat.engine.device import device_name
from onbeat.engine.kv_access import BlockMemory, GivesKV, KVLayout, States, region_bytes
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.speculation.build import ProposerBuilder
from onbeat.perfmodel.device_spec import Parallelism, known_device
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.profile import ProfileKey
from onbeat.scheduler.scheduler_config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can run steps, and what was decided on the way."""

    backend: Backend
    limits: SchedulerConfig
    runner: Runner
    proposer: ProposerBuilder | None = None
    """What proposes drafts; None where nothing does."""

    @property
    def device_name(self) -> str:
        """Where the model runs, or what it stands in for."""
        other = self.backend.stands_in_for
        return str(self.backend.device.device) if other is None else other.device.id

    @property
    def gives_kv(self) -> bool:
        """Whether `kv_memory` can be had."""
        if self.backend.model.state_numbers and not self.limits.num_snapshots:
            return False  # there is no place for states that come
        return isinstance(self.runner.forward, GivesKV) and self.backend.device.device.type == "cpu"

    def kv_memory(self, activation_quantization: str = "auto") -> BlockMemory:
        """Return access to the KV blocks, for engines that hand requests over, where `gives_kv`.

        Parameters
        ----------
        activation_quantization : of what quantized weights are multiplied with.
        """
        forward, backend, limits = self.runner.forward, self.backend, self.limits
        assert isinstance(forward, GivesKV), "whoever asks has looked at gives_kv"
        settings, activations = forward.settings, ""
        states = states_of(self.runner) if isinstance(self.runner, ModelRunner) else None
        if backend.weights_format is not None:
            activations = activation_quantization
            if activations == "auto":  # which the processor decides
                activations = f"as {settings.get('instruction_set', 'the backend')} has them"
        if "batch_invariant" in settings:
            activations += ", batch-invariant"
        layout = KVLayout(
            model=f"{backend.name} ({backend.model.architecture}, {backend.model.num_layers} layers)",
            weights=backend.weights_format or backend.device.dtype.name,
            dtype=backend.device.dtype.name,
            block_size=limits.block_size,
            block_bytes=region_bytes(forward.kv_regions()),
            state_bytes=0 if states is None else region_bytes(states.regions),
            backend=settings["backend"],
            activations=activations,
        )
        return BlockMemory(forward, layout, num_blocks=limits.num_pages, states=states)


def states_of(runner: ModelRunner) -> States | None:
    """Return the states of an engine's requests, each with how many tokens it has taken in."""
    batch = runner.batch
    if not len(batch.states):
        return None
    regions = [*runner.forward.state_regions(), batch.states.region]
    return States(regions, len(batch.states), batch.slots.__getitem__)


def profile_key_of(loaded: LoadedModel, precision: Precision) -> ProfileKey:
    """Return what a profile of this engine holds for."""
    device = loaded.backend.device
    is_cpu = device.device.type == "cpu"
    name, settings = device_name(device), loaded.runner.forward.settings
    return ProfileKey(
        model=loaded.backend.name,
        device="cpu" if is_cpu else known_device(name) or "cuda",
        device_name=name,
        precision=precision,
        parallelism=Parallelism(),
        threads=device.num_threads if is_cpu else 1,
        backend=settings["backend"],
        instruction_set=_what_computes(settings),
    )


def _what_computes(settings: Mapping[str, str]) -> str | None:
    """Return the instruction set, and what else of the settings changes the times of its steps."""
    name = settings.get("instruction_set")
    if name is not None and "batch_invariant" in settings:
        name += " (batch-invariant)"
    if "vllm" in settings:
        name = f"vLLM {settings['vllm']}, {settings['model_runner']} runner"
    graphs = settings.get("graphs", "cuda").partition(",")[0]
    if graphs != "cuda":
        name = ", ".join((*([] if name is None else [name]), f"graphs: {graphs}"))
    return name
