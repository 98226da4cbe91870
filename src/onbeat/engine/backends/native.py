"""The native CPU engine as a backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from onbeat.core.errors import ConfigError
from onbeat.engine.backends.base import CheckpointBackend, Room
from onbeat.engine.device import DeviceConfig, device_name
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.forward import ForwardPass
from onbeat.engine.memory import Footprint, KVCacheSpec
from onbeat.engine.native.forward import NativeForward, NativeModel
from onbeat.engine.native.instruction_sets import choose_instruction_set
from onbeat.engine.native.layouts import LOOKED_UP, WeightLayouts
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.native.packing import WeightPacker
from onbeat.engine.native.structures import HEAD_MULTIPLE, NativeOptions
from onbeat.engine.progress import Detail, OnProgress
from onbeat.engine.weights.checkpoint import Checkpoint
from onbeat.files import cache_dir
from onbeat.scheduler.scheduler_config import SchedulerConfig


class NativeBackend(CheckpointBackend):
    """The native CPU engine.

    Parameters
    ----------
    library : what runs.
    checkpoint, device : the weights, and type and threads.
    config : how it shall run.

    Raises
    ------
    ConfigError : this processor lacks the instruction set, or weights are not quantized that must be.
    """

    def __init__(
        self, library: NativeLibrary, checkpoint: Checkpoint, device: DeviceConfig, config: EngineConfig
    ) -> None:
        layouts = WeightLayouts(checkpoint, dtype=device.dtype, quantization=config.quantization)
        if config.activation_quantization == "int8" and not layouts.are_any_quantized:
            raise ConfigError(
                "activation_quantization int8 needs quantized weights, but those of this model are not; give "
                "--quantization int8 too, or leave --activation-quantization out"
            )
        self._library = library
        self._config = config
        wanted, has = config.instruction_set, library.instruction_sets
        if wanted not in ("auto", *has):
            withheld = f" (withheld: {library.withheld})" if library.withheld else ""
            raise ConfigError(
                f"this processor, its system{withheld} or this build has no {wanted}; choose one of "
                f"{', '.join(has)}, or leave --instruction-set out"
            )
        self._instruction_set = instruction_set = None if wanted == "auto" else wanted
        self.name, self.model = config.model.name, checkpoint.config
        self.checkpoint, self.device = checkpoint, device
        self._layouts = layouts
        self.weights_format = layouts.number_format()
        self.embedding_format = layouts.embedding_format()
        given = "" if instruction_set is None else f"{instruction_set}, "
        numbers = ", batch-invariant" if config.batch_invariant else ""
        self.description = f"by the native engine ({given}{self.weights_format} weights{numbers})"

    def plain_names(self) -> list[str]:
        """Return what is not multiplied as the file has it."""
        return self._layouts.plain_names()

    def savings(self) -> Iterator[tuple[str, int]]:
        """Yield them; see `CheckpointBackend.savings`."""
        for quantization in ("int8", "int4"):
            layouts = WeightLayouts(self.checkpoint, dtype=self.device.dtype, quantization=quantization)
            if (saved := self._layouts.num_bytes() - layouts.num_bytes()) > 0:
                yield f"--quantization {quantization}", saved

    def needs(self, block_size: int) -> Footprint:
        """Return the memory of packed weights and padded heads."""
        kv_cache = KVCacheSpec.of_model(
            self.model, dtype=self.device.dtype, block_size=block_size, head_dim_multiple=HEAD_MULTIPLE
        )
        return Footprint.of(self.model, kv_cache, self._layouts.num_bytes(), LOOKED_UP)

    def build(
        self,
        limits: SchedulerConfig,
        say: OnProgress,
        room: Room | None = None,  # noqa: ARG002
    ) -> tuple[ForwardPass, SchedulerConfig]:
        """Pack the weights, and choose the instruction set."""
        num_threads = self.device.num_threads
        packer = WeightPacker(self._library, self.checkpoint, self._layouts, num_threads=num_threads)
        options = NativeOptions(
            dtype=self.device.dtype,
            num_blocks=limits.num_pages,
            num_tables=limits.num_tables,
            block_size=limits.block_size,
            num_slots=limits.num_states,
            most_drafts=limits.most_drafts,
            num_threads=num_threads,
            activation_quantization=self._config.activation_quantization,
            instruction_set=self._instruction_set,
            batch_invariant=self._config.batch_invariant,
        )
        model = NativeModel(self._library, self.model, packer.pack(), options)
        if self._instruction_set is None:
            if self._library.withheld:
                say(
                    f"the system withholds the instruction set {self._library.withheld}, which this "
                    "processor has; Linux 5.16 or newer grants it, unless a container or sandbox forbids "
                    "the call"
                )
            processor, directory = device_name(self.device), cache_dir() / "instruction-sets"
            chosen, reason = choose_instruction_set(model, processor=processor, directory=directory)
            say(Detail(f"instruction set {chosen}, {reason}"))
            model = model._replace(options=replace(options, instruction_set=chosen))
        return NativeForward(model), limits
