"""From a configuration to a stand-in: sizes, device, limits, vocabulary, step times.

Its forward pass stores and reads KV blocks, and sleeps for the rest of the step. Its KV cache holds, for each
token, the token and a hash of all before it.

Legend: T tokens of the step, R rows, B blocks, S tokens of a block, N blocks that the rows read, P tokens
whose vectors are wanted.
"""

# ruff: noqa: N803, N806 -- tensor names carry shape suffixes

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError, DoesNotFit
from onbeat.core.request import TokenLogprobs
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.core.tokenizer import Tokenizer
from onbeat.engine.backends.base import CheckpointBackend, ForwardBackend, Room, SettleLimits
from onbeat.engine.device import CPU, DeviceConfig
from onbeat.engine.draw import Logits
from onbeat.engine.dtypes import DTYPES
from onbeat.engine.engine_config import EngineConfig, MemoryShare, own_settings
from onbeat.engine.forward import ForwardPass, StepLogits
from onbeat.engine.guided_draw import hold_to_grammars
from onbeat.engine.input_batch import AttentionBatch, IntArray, StepInputs
from onbeat.engine.kv_access import KVRegion
from onbeat.engine.memory import num_blocks_in
from onbeat.engine.model_config.architecture import ModelConfig, RopeConfig
from onbeat.engine.progress import OnProgress
from onbeat.engine.random_stream import GOLDEN_GAMMA, mix, mix_words
from onbeat.engine.sampled import BestTokens, SampledTokens, TokenSampler
from onbeat.engine.sampling_row import SamplingRow, TokenIds
from onbeat.engine.step_time_spec import COMMON_SIZES, model_spec_of, precision_of
from onbeat.engine.weights.open import read_model_config
from onbeat.hub.files import ModelFiles
from onbeat.hub.known import KNOWN_MODELS
from onbeat.perfmodel.device_spec import Parallelism, device_ids, find_device
from onbeat.perfmodel.memory import Change, Choices, held_bytes_per_token, kv_capacity, kv_groups, what_fits
from onbeat.perfmodel.model_spec import ModelSpec, find_model_spec
from onbeat.perfmodel.models import StepTimeDescription, by_data_sheet, roofline_predictor
from onbeat.perfmodel.precision import Precision
from onbeat.scheduler import scheduler_config
from onbeat.scheduler.replica.token_budget import most_step_tokens
from onbeat.text.tokenizer import load_tokenizer

_Words = NDArray[np.uint64]

SOURCES = ("auto", "roofline", "none")
"""What may predict the steps of a stand-in (`EngineConfig.step_time_profile`)."""
_UNUSED = (
    ("backend", "auto", "--backend chooses what computes steps"),
    ("enforce_eager", False, "--enforce-eager is of a GPU's graphs"),
    ("cuda_graph_pieces", False, "--cuda-graph-pieces is of a GPU's graphs"),
    ("threads", None, "--threads are of a forward pass"),
    ("speculative", None, "--speculative-config needs a model that verifies drafts"),
)


_PROCESS_BYTES = 128 << 20
"""Of a stand-in: its interpreter and tokenizer, as measured; its KV is a number a token."""


class StandInBackend(ForwardBackend):
    """No model: steps take the time that the roofline predicts for another device.

    Parameters
    ----------
    config : what it stands in for, and the limits.

    Raises
    ------
    ConfigError : the model, the device or a number format is not known, something does not go together, or
        the machine has no memory for so many.
    """

    description = "by a stand-in"

    def __init__(self, config: EngineConfig) -> None:
        _check(config)
        _check_memory(config.memory_share)
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        device, precision = find_device(config.device), _precision(dtype)
        device.peak(precision.compute)
        self.name = config.model.name
        self.stands_in_for = self._what = StepTimeDescription(
            model=sizes_of(config.model),
            device=device,
            parallelism=Parallelism(tensor=config.tensor_parallel_size),
            precision=precision,
        )
        self.device = DeviceConfig(CPU, DTYPES[dtype], num_threads=1)
        self._tokenizer_path = config.model.path
        self._tokenizer = load_tokenizer(config.model.path)
        self.model = _model_config(self._what.model, self._tokenizer)
        tensor = self._what.parallelism.tensor
        devices = device.id if tensor == 1 else f"{tensor} x {device.id}"
        self.deployment = f"{self._what.model.name} on {devices}"
        """What it stands in for, in words."""

    def headline(self) -> str:
        """Say what it stands in for, and that answers mean nothing."""
        return (
            f"stand-in for {self.deployment} ({self._what.precision}): steps take their predicted time, "
            f"answers mean nothing; tokenizer of {self._tokenizer_path}"
        )

    def ahead(self) -> StepTimeModel | None:
        """Return what its data sheet tells of steps."""
        return by_data_sheet(self._what)

    def fit(
        self,
        config: EngineConfig,
        settle: SettleLimits,
        draft: CheckpointBackend | None = None,  # noqa: ARG002 -- which `_check` refuses
    ) -> scheduler_config.SchedulerConfig:
        """Decide what the user left open, as the memory of the other device allows."""
        limits, kv_bytes, model = config.limits, config.kv_cache_memory_bytes, self._what.model
        longest = limits.max_model_len or model.max_position_embeddings
        windows = kv_groups(model).windows(model.sliding_window, longest)
        if kv_bytes is None:
            return settle(_blocks_that_fit(config, self._what, windows), **windows)
        block_size = limits.block_size or scheduler_config.DEFAULT_BLOCK_SIZE
        held = held_bytes_per_token(model, self._what.precision, windows.get("num_tables", 1))
        return settle(num_blocks_in(kv_bytes, int(held * block_size), block_size), **windows)

    def build(
        self,
        limits: scheduler_config.SchedulerConfig,
        say: OnProgress,  # noqa: ARG002
        room: Room | None = None,  # noqa: ARG002
    ) -> tuple[ForwardPass, scheduler_config.SchedulerConfig]:
        """Make the KV cache."""
        forward = StandInForward(
            self.model,
            ordinary_ids=_ordinary_ids(self._tokenizer),
            step_seconds=roofline_predictor(self._what).step_time,
            num_blocks=limits.num_pages,
            block_size=limits.block_size,
            settings={"backend": "stand-in", "stands_in_for": self.deployment},
        )
        return forward, limits

    def sampler(self) -> TokenSampler:
        """Return what takes the tokens that the stand-in makes up."""
        return StandInSampler()


def _check_memory(share: MemoryShare | None) -> None:
    """Check that replicas beside one another have memory for their processes."""
    if share is None or share.num_shares == 1 or share.num_shares * _PROCESS_BYTES <= share.total_bytes:
        return
    raise ConfigError(
        f"each replica is a process of some {_PROCESS_BYTES >> 20} MiB, but this machine has "
        f"{share.total_bytes >> 20} MiB left for {share.num_shares} of them; "
        f"use --replicas {max(1, share.total_bytes // _PROCESS_BYTES)}"
    )


def sizes_of(files: ModelFiles) -> ModelSpec:
    """Return the sizes of a model: of the file's own, or by the name of a known one.

    Raises
    ------
    ConfigError : the model is not known, or its configuration cannot be used.
    """
    if files.kind == "gguf" and (files.name in KNOWN_MODELS or files.name.endswith(".gguf")):
        return model_spec_of(read_model_config(files), files.name)
    return find_model_spec(files.name)


def _check(config: EngineConfig) -> None:
    """Refuse what has no meaning without a model."""
    if config.device == "auto":
        raise ConfigError(
            f"a stand-in needs a device to stand in for: give --device, one of {', '.join(device_ids())}"
        )
    for name, unused, why in _UNUSED:
        if getattr(config, name) != unused:
            raise ConfigError(f"a stand-in computes nothing, but {why}; leave it out")
    for name, value, _ in own_settings(config):
        flag = name.replace("_", "-")
        raise ConfigError(f"a stand-in computes nothing with --{flag} {value}; leave it out")
    if config.step_time_profile not in SOURCES:
        raise ConfigError(
            f"the steps of a stand-in take the roofline's time, so --step-time-profile "
            f"{config.step_time_profile} cannot predict them; choose one of {', '.join(SOURCES)}"
        )


def _blocks_that_fit(config: EngineConfig, what: StepTimeDescription, windows: Mapping[str, int]) -> int:
    """Return the KV blocks that the device holds beside the weights.

    Raises
    ------
    DoesNotFit : it does not hold the longest request; the message says what was tried and fits.
    """
    limits = config.limits
    largest = most_step_tokens(limits, by_data_sheet(what))

    def num_blocks(at: StepTimeDescription) -> int:
        return kv_capacity(
            at,
            block_size=limits.block_size or scheduler_config.DEFAULT_BLOCK_SIZE,
            max_num_batched_tokens=largest,
            gpu_memory_utilization=config.gpu_memory_utilization,
            least_tokens=min(limits.max_model_len or 1, what.model.max_position_embeddings),
            **windows,
        ).num_blocks

    def attempt(to: Change) -> None:
        other = replace(what, parallelism=Parallelism(to.tensor), precision=_precision(to.weights))
        other.predictor()
        num_blocks(other)

    try:
        return num_blocks(what)
    except DoesNotFit as error:
        is_wide = what.precision.weights == "fp32"
        now = Change(what.parallelism.tensor, 1, "float32" if is_wide else "bfloat16")
        formats = ("bfloat16",) if is_wide else ()
        choices = Choices(tensor="--tensor-parallel-size", pipeline=None, formats=formats)
        raise DoesNotFit(f"{error}. {what_fits(now, what.model, choices, attempt)}") from None


def _precision(dtype: str) -> Precision:
    """Return the number formats of a stand-in.

    Raises
    ------
    ConfigError : no step-time model knows them.
    """
    precision = precision_of(DTYPES[dtype])
    if precision is None:
        raise ConfigError(f"no step-time model knows {dtype}; choose --dtype bfloat16 or float32")
    return precision


def _model_config(spec: ModelSpec, tokenizer: Tokenizer) -> ModelConfig:
    return ModelConfig(
        family="llama",
        architecture="stand-in",
        vocab_size=tokenizer.vocab_size,
        **{name: getattr(spec, name) for name in COMMON_SIZES},
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=1e4),
        eos_token_ids=tokenizer.eos_token_ids,
    )


def _ordinary_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that have text."""
    special = {*tokenizer.special_token_ids, *tokenizer.eos_token_ids}
    ids = [token_id for token_id in range(tokenizer.vocab_size) if token_id not in special]
    return [token_id for token_id in ids if tokenizer.token_bytes(token_id)] or ids


TOKEN_BITS = 24
"""Of an entry's 64 bits, those of the token id; the others are the hash."""
_HASH_MASK = np.uint64((1 << (64 - TOKEN_BITS)) - 1)
_SHIFT = np.uint64(TOKEN_BITS)
_GOLDEN = np.uint64(GOLDEN_GAMMA)
_OWN_NUMBERS = 64
"""Of a token's vector: those of two tokens are nearly orthogonal, and more would take a stand-in's time."""


class HashCache:
    """The cache in blocks, as an engine that computes has it.

    A token's entry is made of its id, its position and the entry before it, which is read from the cache as
    attention would read it. What follows a request's tokens is made of every entry in its blocks.

    Parameters
    ----------
    num_blocks, block_size : of the cache.

    Attributes
    ----------
    entries_BS : the cache.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.entries_BS: _Words = np.zeros((num_blocks, block_size), np.uint64)
        self._block_size = block_size
        weights = mix_words(np.arange(1, block_size + 1, dtype=np.uint64) * _GOLDEN)
        self._weights_S: _Words = weights | np.uint64(1)  # odd, so that no difference is lost

    def store(self, token_ids_T: IntArray, positions_T: IntArray, batch: AttentionBatch) -> None:
        """Write the entries of a step's tokens."""
        query_lens_R = batch.query_lens_R
        ends_R = np.cumsum(query_lens_R)
        firsts_R = ends_R - query_lens_R
        tokens_T = token_ids_T.astype(np.uint64)
        places_T = positions_T.astype(np.uint64) << np.uint64(32)
        sums_T = np.cumsum(mix_words((tokens_T | places_T) + _GOLDEN), dtype=np.uint64)
        sums_before_R = np.concatenate([np.zeros(1, np.uint64), sums_T])[firsts_R]
        bases_R = self._hashes_before(positions_T[firsts_R], batch) - sums_before_R
        hashes_T = (sums_T + np.repeat(bases_R, query_lens_R)) & _HASH_MASK
        self.entries_BS.reshape(-1)[batch.slot_mapping_T] = (hashes_T << _SHIFT) | tokens_T

    def numbers(self, slots_R: IntArray, num_tokens_R: IntArray, block_tables_SB: NDArray[Any]) -> _Words:
        """Return a number for each row, made of all entries of its first tokens and of how many there are.

        Parameters
        ----------
        slots_R : each row's line of the block tables.
        num_tokens_R : its tokens, at least one.
        """
        size = self._block_size
        num_blocks_R = -(-num_tokens_R // size)
        ends_R = np.cumsum(num_blocks_R)
        firsts_R = ends_R - num_blocks_R
        places_N = np.arange(ends_R[-1]) - np.repeat(firsts_R, num_blocks_R)
        entries_NS = self.entries_BS[block_tables_SB[np.repeat(slots_R, num_blocks_R), places_N]]
        num_last_R = num_tokens_R - (num_blocks_R - 1) * size
        entries_NS[ends_R - 1] *= np.arange(size) < num_last_R[:, None]
        digests_N = mix_words(entries_NS @ self._weights_S + places_N.astype(np.uint64) * _GOLDEN)
        return mix_words(np.add.reduceat(digests_N, firsts_R) + num_tokens_R.astype(np.uint64))

    def vectors(self, slots_P: IntArray, width: int) -> NDArray[np.float32]:
        """Return a vector for each token, made of its entry: of the token and all before it, [P, width].

        Parameters
        ----------
        slots_P : where the tokens' entries are.
        width : numbers of a vector, of which the first `_OWN_NUMBERS` are repeated.
        """
        entries_P1 = self.entries_BS.reshape(-1)[slots_P, None]
        places = np.arange(_OWN_NUMBERS, dtype=np.uint64) * _GOLDEN
        numbers = mix_words(entries_P1 + places).astype(np.int64).astype(np.float32) * np.float32(2.0**-63)
        return numbers[:, np.arange(width) % _OWN_NUMBERS]

    def _hashes_before(self, starts_R: IntArray, batch: AttentionBatch) -> _Words:
        """Return the hash of the token before each row's first one; 0 where there is none."""
        before_R = np.maximum(starts_R - 1, 0)
        blocks_R = batch.block_tables_SB[batch.slots_R, before_R // self._block_size]
        entries_R: _Words = self.entries_BS[blocks_R, before_R % self._block_size]
        return np.where(starts_R > 0, entries_R >> _SHIFT, np.uint64(0))


_MOST_TRIES = 64
"""Tokens looked at for one that does not end the request, before all are."""
_LAG_MEMORY = 0.1
"""Weight of one more sleep in how much too long they take."""
_MOST_LAG = 2e-4
"""Seconds; a sleep that takes longer by more was kept from ending by others on the processor."""


class StandInForward(ForwardPass):
    """Takes as long as a step is predicted to take, and says what its KV blocks make of it.

    The next token of a request is a hash of all that its blocks hold, and of its place in the answer; with a
    temperature, of the seed too. No token is one of the request's stop tokens, so that answers end by
    `max_tokens`. Other sampling parameters than `allowed_token_ids` have no effect.

    Parameters
    ----------
    config : the model that it stands in for; its vocabulary is that of the tokenizer.
    ordinary_ids : tokens that answers are made of.
    step_seconds : how long a step takes.
    num_blocks, block_size : of the KV cache.
    settings : what a reader of measurements wants to know.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        ordinary_ids: Sequence[int],
        step_seconds: Callable[[BatchShape], float],
        num_blocks: int,
        block_size: int,
        settings: Mapping[str, str],
    ) -> None:
        self.config = config
        self.device = CPU
        self.settings = settings
        self.cache = HashCache(num_blocks, block_size)
        self._ordinary_ids = tuple(ordinary_ids)
        self._step_seconds = step_seconds
        self._lag = 0.0

    def run(
        self,
        inputs: StepInputs,
        *,
        wants_logits: bool,  # noqa: ARG002 -- there are none
    ) -> StepLogits:
        """Run one step; see `ForwardPass.run`. Its sampler needs the best tokens alone."""
        start = time.monotonic()
        self.cache.store(inputs.token_ids_T, inputs.positions_T, inputs.attention)
        best = self._choose(inputs) if inputs.sampling_rows else None
        hidden_PD = None
        if inputs.pooled:
            slots = inputs.attention.slot_mapping_T[inputs.pooled_tokens]
            hidden_PD = self.cache.vectors(slots, self.config.hidden_size)
        seconds = self._step_seconds(shape_of(inputs))
        self._sleep_until(start + seconds)
        return StepLogits(None, best, seconds, hidden_PD)

    def scrub(self, block_ids: IntArray) -> None:
        """Leave all as it is: no number here is not finite."""

    def kv_regions(self) -> list[KVRegion]:
        """Return the entries of all blocks; see `GivesKV`."""
        entries_BS = self.cache.entries_BS
        return [KVRegion(entries_BS.ctypes.data, entries_BS[0].nbytes)]

    def _choose(self, inputs: StepInputs) -> BestTokens:
        numbers_R = self.cache.numbers(
            inputs.sampling_slots, inputs.sampling_positions, inputs.attention.block_tables_SB
        )
        rows = zip(inputs.sampling_rows, numbers_R.tolist(), strict=True)
        ids_R = np.array([self._token(row, number) for row, number in rows], np.int64)
        return BestTokens(ids_R, np.zeros(len(ids_R), np.float32))

    def _token(self, row: SamplingRow, number: int) -> int:
        """Return the token that a number stands for in a request's answer."""
        params = row.params
        number = mix(number + row.position)
        if not row.is_greedy:
            number = mix(number ^ mix(params.seed))
        candidates = params.allowed_token_ids or self._ordinary_ids
        for _ in range(_MOST_TRIES):
            token_id = candidates[number % len(candidates)]
            if token_id not in params.stop_token_ids:
                return token_id
            number = mix(number + 1)
        stops = frozenset(params.stop_token_ids)
        left = [token_id for token_id in candidates if token_id not in stops] or candidates
        return left[number % len(left)]

    def _sleep_until(self, end: float) -> None:
        """Sleep, and learn by how much sleeps are too long, so that steps are not on average."""
        seconds = end - self._lag - time.monotonic()
        if seconds <= 0:
            return
        time.sleep(seconds)
        late = min(max(time.monotonic() - end, -_MOST_LAG), _MOST_LAG)
        self._lag = min(max(self._lag + _LAG_MEMORY * late, 0.0), _MOST_LAG)


class StandInSampler:
    """Takes the tokens as the forward pass has chosen them; each is certain."""

    trusts_device = False
    """Its forward pass launches nothing."""

    def needs_logits(self, rows: Sequence[SamplingRow]) -> bool:  # noqa: ARG002 -- whatever they ask for
        return False

    def sample(
        self,
        logits_RV: Logits | None,  # noqa: ARG002 -- there are none
        rows: Sequence[SamplingRow],
        best: BestTokens | None = None,
    ) -> SampledTokens:
        assert best is not None, "the forward pass has chosen"
        ids = best.ids_R.tolist()
        guided = [index for index, row in enumerate(rows) if row.is_guided]
        work = hold_to_grammars(rows, guided, ids, partial(_other_tokens, ids)) if guided else None
        return SampledTokens(
            ids,
            [_certain(token_id, row.params.num_logprobs) for token_id, row in zip(ids, rows, strict=True)],
            {} if work is None else work.errors,
            work,
        )

    def score(
        self,
        logits_RV: Logits | None,  # noqa: ARG002 -- there are none
        token_ids: Sequence[int],
        num_alternatives: Sequence[int],
    ) -> list[TokenLogprobs]:
        certain = map(_certain, token_ids, num_alternatives)
        return [replace(report, rank=1) for report in certain if report is not None]


def _other_tokens(token_ids: Sequence[int], refused: Sequence[int], allowed: Sequence[TokenIds]) -> list[int]:
    """Return for each refused token one that the grammar allows, which the refused one stands for."""
    return [int(ids[token_ids[index] % len(ids)]) for index, ids in zip(refused, allowed, strict=True)]


def shape_of(inputs: StepInputs) -> BatchShape:
    """Return what a step costs, from the arrays that a forward pass gets."""
    query_lens_R, context_lens_R = inputs.attention.query_lens_R, inputs.attention.context_lens_R
    is_chunk_R = query_lens_R > 1
    lens, contexts = query_lens_R[is_chunk_R], context_lens_R[is_chunk_R]
    cached = contexts - lens
    return BatchShape(
        num_new_tokens=int(query_lens_R.sum()),
        num_sequences=len(query_lens_R),
        num_decodes=len(query_lens_R) - len(lens),
        num_chunks=len(lens),
        query_key_pairs=int((lens * cached + lens * (lens + 1) // 2).sum()),
        chunk_cached_tokens=int(cached.sum()),
        decode_context_tokens=int(context_lens_R.sum() - contexts.sum()),
        sum_chunk_squares=int((lens * lens).sum()),
        num_lm_head_rows=len(inputs.sampling_tokens),
    )


def _certain(token_id: int, num_logprobs: int | None) -> TokenLogprobs | None:
    """Return the log-probabilities of a token that had no alternative; None where nobody asked."""
    if num_logprobs is None:
        return None
    shown = min(num_logprobs, 1)
    return TokenLogprobs(token_id, 0.0, (token_id,) * shown, (0.0,) * shown)
