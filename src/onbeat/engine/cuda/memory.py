"""How many KV blocks a GPU has room for: what the largest steps take is measured, not guessed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice

import torch

from onbeat.core.errors import ConfigError
from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import AdmittedRequest, ScheduledRequest
from onbeat.engine.forward import ForwardPass
from onbeat.engine.input_batch import InputBatch, StepInputs
from onbeat.engine.memory import flag_size
from onbeat.scheduler.scheduler_config import SchedulerConfig

_UNSEEN_BYTES = 64 << 20
"""For what the driver takes later: more of a stream's, of a library's."""
_GRAPH_BYTES = 24 << 20
"""For a captured graph, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """A device's memory once the weights are there, and what steps take beside them; bytes."""

    total: int
    used: int
    """By the weights, by libraries, and by whoever else is on the device."""
    step: int
    """By the largest step while it runs, and by what steps keep beside the KV cache."""
    num_graphs: int

    @property
    def still_bytes(self) -> int:
        """What is still to be taken, the KV cache left out."""
        return self.step + _UNSEEN_BYTES + self.num_graphs * _GRAPH_BYTES

    def num_blocks(
        self, utilization: float, *, block_bytes: int, other_bytes: int, wanted: int | None
    ) -> int:
        """Return how many KV blocks there are to be: as many as are wanted, else as many as fit.

        Parameters
        ----------
        utilization : share of the device's memory that may be used by all.
        block_bytes : of a block, with what a draft model keeps beside it.
        other_bytes : that are still to be taken by others, such as a draft model.
        wanted : None leaves the number open.

        Raises
        ------
        ConfigError : so many do not fit, or not even one does.
        """
        # One block more is for padding.
        left = int(utilization * self.total) - self.used - self.still_bytes - other_bytes
        fitting = left // block_bytes - 1
        if fitting >= (wanted or 1):
            return wanted or fitting
        problem = (
            f"of the GPU's {_size(self.total)}, {_size(self.used)} are taken by weights, libraries and "
            f"others, and the largest steps take {_size(self.step)}: a share of {utilization} "
            "(--gpu-memory-utilization) leaves "
        )
        if fitting < 1:
            raise ConfigError(
                f"{problem}no room for a KV cache; lower --max-num-batched-tokens or --max-num-seqs, raise "
                "the share, or use a smaller model"
            )
        raise ConfigError(
            f"{problem}{_size(fitting * block_bytes)} for the KV cache, but "
            f"{_size((wanted or 0) * block_bytes)} are asked for; what fits is "
            f"--kv-cache-memory-bytes {flag_size(fitting, block_bytes)}"
        )

    def __str__(self) -> str:
        return (
            f"the largest steps take {_size(self.step)} beside {_size(self.used)} of {_size(self.total)} of "
            "the GPU's memory, as measured"
        )


def measure(
    device: torch.device,
    build: Callable[[int], ForwardPass],
    steps: Sequence[StepInputs],
    *,
    block_bytes: int,
    num_graphs: int,
) -> MeasuredMemory:
    """Run steps on a KV cache just large enough, with the weights in place.

    Parameters
    ----------
    build : makes a forward pass with so many KV blocks.
    steps : the largest there can be.
    block_bytes : of one block.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    num_blocks = max(int(step.attention.block_tables_SB.max()) + 1 for step in steps)
    forward = build(num_blocks)
    for step in steps:
        forward.run(step, wants_logits=True)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before - (num_blocks + 1) * block_bytes
    forward.close()
    del forward
    gc.collect()  # it and its graphs refer to each other; what it took would count as used for good
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MeasuredMemory(total=total, used=total - free, step=max(peak, 0), num_graphs=num_graphs)


def bytes_above(device: torch.device, utilization: float) -> int:
    """Return how much more of a device's memory is taken than a share of it; negative where less is."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - int(utilization * total)


def largest_steps(limits: SchedulerConfig) -> list[StepInputs]:
    """Return a step of as many prompt tokens as there may be, and one of as many rows that decode.

    With drafts there is a third one, of as many tokens that are drawn as there may be.
    """
    num_tokens, longest = limits.max_num_batched_tokens, limits.max_model_len
    lens = [longest] * (num_tokens // longest)
    if rest := num_tokens % longest:
        lens.append(rest)
    steps = [_step(limits, lens[: limits.max_num_seqs]), _step(limits, [1] * limits.max_num_seqs)]
    if limits.speculation is not None:
        length = min(1 + limits.speculation.num_speculative_tokens, longest, num_tokens)
        num_rows = min(limits.max_num_seqs, num_tokens // length)
        steps.append(_step(limits, [length] * num_rows, num_drafts=length - 1))
    return steps


def _step(limits: SchedulerConfig, lens: Sequence[int], num_drafts: int = 0) -> StepInputs:
    """Return a step of rows without a past, each of which samples behind its last token and its drafts."""
    batch = InputBatch(
        max_num_seqs=len(lens), max_model_len=limits.max_model_len, block_size=limits.block_size
    )
    block_ids, rows = count(), []
    for index, length in enumerate(lens):
        prompt = (0,) * (length - num_drafts)
        request = Request(request_id=str(index), prompt_token_ids=prompt, sampling=SamplingParams())
        own_blocks = tuple(islice(block_ids, -(-length // limits.block_size)))
        batch.admit(AdmittedRequest(request, (), own_blocks))
        name, drafts = request.request_id, num_drafts
        rows.append(ScheduledRequest(name, 0, length, (), samples=True, num_draft_tokens=drafts))
    return batch.prepare(rows, [[0] * num_drafts] * len(rows) if num_drafts else None)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
