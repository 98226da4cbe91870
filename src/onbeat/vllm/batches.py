"""Which steps are measured inside vLLM at its start: prompts alone, decodes alone, and both together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

LARGEST_BATCH = 8192
"""Most tokens of a measured step: longer ones cost in proportion."""
MOST_DECODES = 512
_SMALLEST_CHUNK = 16
_SHORT = 16
"""Tokens of the prompts whose decodes read next to nothing."""
_LONGEST = 32_768
"""Tokens of the longest prompt."""
_MOST_GRAPHS = 12
"""Sizes of CUDA graphs that are measured, on both of their sides."""
_SPARE = 32
"""Tokens that each request may generate beyond what is planned: steps overlap."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a step and the KV cache hold.

    Attributes
    ----------
    num_tokens : of a step.
    num_seqs : requests of a step.
    max_model_len : tokens of a request.
    num_kv_tokens : that the cache holds.
    graph_sizes : batch sizes of CUDA graphs, ascending.
    num_drafts : that each decode verifies.
    """

    num_tokens: int
    num_seqs: int
    max_model_len: int
    num_kv_tokens: int
    graph_sizes: Sequence[int] = ()
    num_drafts: int = 0

    @property
    def num_of_decode(self) -> int:
        """Tokens that a decode takes."""
        return 1 + self.num_drafts


@dataclass(frozen=True, slots=True)
class Stage:
    """Requests, and the steps in which they are run before they end.

    Attributes
    ----------
    prompts : tokens of each request's prompt.
    steps : of each step, the requests by their place in `prompts` and the tokens that they get; one whose
        prompt is through gets one, whatever is said, and its drafts.
    num_output : tokens that each request may generate.
    """

    prompts: list[int]
    steps: list[list[tuple[int, int]]] = field(default_factory=list)
    num_output: int = 0

    @property
    def largest(self) -> int:
        """Tokens of its largest step, without drafts."""
        return max(sum(num for _, num in step) for step in self.steps)


def stages(limits: BatchLimits) -> list[Stage]:
    """Return some 60 steps, small ones first."""
    length = (limits.max_model_len - 2 * _SPARE * limits.num_of_decode) // 2
    most = max(min(limits.num_tokens, LARGEST_BATCH, length, limits.num_kv_tokens // 4), 1)
    made = [*_prompts(most), _decodes(limits, most), *_mixes(limits, most), _deep(limits, most)]
    made = [replace(each, num_output=(len(each.steps) + _SPARE) * limits.num_of_decode) for each in made]
    return sorted((stage for stage in made if stage.steps), key=lambda stage: stage.largest)


def _prompts(most: int) -> Iterator[Stage]:
    """Yield a chunk of each size, and one of the same size behind it."""
    size = _SMALLEST_CHUNK
    while size < most:
        yield Stage([2 * size], [[(0, size)], [(0, size)]])
        size *= 2
    yield Stage([2 * most], [[(0, most)], [(0, most)]])


def _deep(limits: BatchLimits, most: int) -> Stage:
    """Return the chunks of a long prompt, and decodes that read it."""
    chunk = min(most, 2048)
    room = min(
        limits.max_model_len - 2 * _SPARE * limits.num_of_decode,
        limits.num_kv_tokens // 2,
        _LONGEST,
        8 * chunk,
    )
    num_chunks = max(room // chunk, 1)
    return Stage([num_chunks * chunk], [[(0, chunk)]] * num_chunks + [[(0, 1)]] * 3)


def _decodes(limits: BatchLimits, most: int) -> Stage:
    """Return decodes of many sizes, those of CUDA graphs and just above them among them."""
    each = limits.num_of_decode
    num = min(limits.num_seqs, MOST_DECODES, most // each, limits.num_kv_tokens // (4 * _SHORT * each))
    sizes = {1 << power for power in range(num.bit_length())} | {num}
    graphs = [size for size in limits.graph_sizes if size < num]
    for size in graphs[:: max(1, -(-len(graphs) // _MOST_GRAPHS))]:
        sizes |= {size, size + 1}
    steps = _fill([_SHORT] * num, min(most, MOST_DECODES))
    steps += [[(place, 1) for place in range(size)] for size in sorted(sizes) if size <= num]
    return Stage([_SHORT] * num, steps)


def _mixes(limits: BatchLimits, most: int) -> Iterator[Stage]:
    """Yield decodes that read much, alone and beside chunks of several sizes."""
    context = min(1024, most, limits.max_model_len // 2)
    room = min(limits.num_kv_tokens // 4, _LONGEST)
    for num in (4, 16, 64):
        chunks = [size for size in (64, 256, 1024) if size + num * limits.num_of_decode <= most]
        if num + len(chunks) > limits.num_seqs or num * context + sum(chunks) > room:
            return
        prompts = [context] * num + chunks
        steps = _fill([context] * num, most)
        decodes = [(place, 1) for place in range(num)]
        steps += [decodes, decodes[: num // 2]]
        steps += [[*decodes, (num + place, size)] for place, size in enumerate(chunks)]
        yield Stage(prompts, steps)


def _fill(prompts: Sequence[int], most: int) -> list[list[tuple[int, int]]]:
    """Return the steps in which prompts are computed, as many as fit into each."""
    steps: list[list[tuple[int, int]]] = [[]]
    left = most
    for place, num in enumerate(prompts):
        if num > left:
            steps.append([])
            left = most
        steps[-1].append((place, num))
        left -= num
    return steps
