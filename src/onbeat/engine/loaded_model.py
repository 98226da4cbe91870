"""A model that can run steps, and what was decided on the way to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onbeat.engine.device import DeviceConfig, device_name
from onbeat.engine.kv_access import BlockMemory, GivesKV, KVLayout, block_bytes_of
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.speculation.build import ProposerBuilder
from onbeat.perfmodel.description import StepTimeDescription
from onbeat.perfmodel.device_spec import known_device
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.profile import ProfileKey
from onbeat.scheduler.scheduler_config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can run steps, and what was decided on the way."""

    name: str
    config: ModelConfig
    device: DeviceConfig
    limits: SchedulerConfig
    runner: ModelRunner
    weights_format: str | None
    """Number format of most weights; None where they are of the device's type."""
    embedding_format: str | None
    """Of the LM head, likewise."""
    proposer: ProposerBuilder | None = None
    """What proposes drafts; None where nothing does."""
    stands_in_for: StepTimeDescription | None = None
    """What takes its time elsewhere; None where the model runs here."""

    @property
    def device_name(self) -> str:
        """Where the model runs, or what it stands in for."""
        return str(self.device.device) if self.stands_in_for is None else self.stands_in_for.device.id

    @property
    def gives_kv(self) -> bool:
        """Whether `kv_memory` can be had."""
        return isinstance(self.runner.forward, GivesKV) and self.device.device.type == "cpu"

    def kv_memory(self, activation_quantization: str = "auto") -> BlockMemory:
        """Return access to the KV blocks, for engines that hand requests over, where `gives_kv`.

        Parameters
        ----------
        activation_quantization : of what quantized weights are multiplied with.
        """
        forward, limits = self.runner.forward, self.limits
        assert isinstance(forward, GivesKV), "whoever asks has looked at gives_kv"
        settings, activations = self.runner.forward.settings, ""
        if self.weights_format is not None:
            activations = activation_quantization
            if activations == "auto":  # which the processor decides
                activations = f"as {settings.get('instruction_set', 'the backend')} has them"
        if "batch_invariant" in settings:
            activations += ", batch-invariant"
        layout = KVLayout(
            model=f"{self.name} ({self.config.architecture}, {self.config.num_layers} layers)",
            weights=self.weights_format or self.device.dtype.name,
            dtype=self.device.dtype.name,
            block_size=limits.block_size,
            block_bytes=block_bytes_of(forward),
            backend=settings["backend"],
            activations=activations,
        )
        return BlockMemory(forward, layout, num_blocks=limits.num_blocks)


def profile_key_of(loaded: LoadedModel, precision: Precision) -> ProfileKey:
    """Return what a profile of this engine holds for."""
    device = loaded.device
    is_cpu = device.device.type == "cpu"
    name, settings = device_name(device), loaded.runner.forward.settings
    return ProfileKey(
        model=loaded.name,
        device="cpu" if is_cpu else known_device(name) or "cuda",
        device_name=name,
        precision=precision,
        threads=device.num_threads if is_cpu else 1,
        backend=settings["backend"],
        instruction_set=_what_computes(settings),
    )


def _what_computes(settings: Mapping[str, str]) -> str | None:
    """Return the instruction set, and what else of the settings changes the times of its steps."""
    name = settings.get("instruction_set")
    if name is not None and "weights_copy" in settings:
        name += f" with a copy of the weights {settings['weights_copy']}"
    if name is not None and "batch_invariant" in settings:
        name += " (batch-invariant)"
    graphs = settings.get("graphs", "cuda").partition(",")[0]
    return name if graphs == "cuda" else f"graphs: {graphs}"
