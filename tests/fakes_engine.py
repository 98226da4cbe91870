"""An engine that answers with given tokens at a given pace, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import EngineDead, OnbeatError
from onbeat.core.fleet import ReplicaLimits
from onbeat.core.protocols import Delivery, EngineInfo, EnginePulse, StepObserver, StepOutputs
from onbeat.core.request import FinishReason, Pooling, Request, RequestOutput, TokenLogprobs
from onbeat.core.step import BatchShape
from onbeat.core.step_stats import DraftStats, StepStats

EOS = 256
BOS = 257
THINK = 258
"""A special token that is not an end."""
VOCAB_SIZE = 260
LOGPROB = -0.5


class ByteTokenizer:
    """Token i < 256 is byte i; then end, start, `<think>`, and one that has no bytes."""

    vocab_size = VOCAB_SIZE
    bos_token_id = BOS
    eos_token_ids = (EOS,)
    special_token_ids = frozenset(range(EOS, VOCAB_SIZE))
    strips_leading_space = False
    chat_template = None
    _special = {EOS: b"<eos>", BOS: b"<bos>", THINK: b"<think>"}  # noqa: RUF012 - never changed

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS, *text.encode()] if add_special_tokens else list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in token_ids if i < EOS or not skip_special_tokens]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < EOS else self._special.get(token_id, b"")

    def token_entry(self, token_id: int) -> str:
        return f"<{token_id}>" if token_id < EOS else self.token_text(token_id)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


class LeadingSpaceTokenizer(ByteTokenizer):
    """Loses the first space of a text, as SentencePiece vocabularies do."""

    strips_leading_space = True

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens).removeprefix(" ")


EMBEDDING_SIZE = 32


def counted(token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the embedding of the fake model: how often each token is there, modulo its size."""
    counts = np.bincount(np.array(token_ids) % EMBEDDING_SIZE, minlength=EMBEDDING_SIZE)
    return counts.astype("<f4")


@dataclass
class Script:
    """What the engine says, and how."""

    text: str = "Hello, world!"
    answers: list[str] = field(default_factory=list)
    """What it says to one request after another; `text` is then the last of them."""
    end: bool = True
    """Whether an end token follows the text; without, the text starts over."""
    tokens_per_step: int = 1
    drafts_per_step: int = 0
    """Drafts verified at each step; one less than its tokens are accepted, those behind the end included."""
    seconds_per_step: float = 0.0
    first_delay: float = 0.0
    error_after: int | None = None
    """Deliveries after which the request fails."""
    die_after: int | None = None
    """Deliveries after which the engine dies."""
    stall_after: int | None = None
    """Deliveries after which no other one comes, nor an answer to an abort."""
    reject: OnbeatError | None = None
    num_cached_tokens: int = 0


@dataclass
class FakeEngine:
    """A `core.protocols.EngineClient` without a model."""

    script: Script = field(default_factory=Script)
    max_model_len: int = 2048
    priority_scheduling: bool = False
    pooling: Pooling = "last"
    generates: bool = True
    left_out: dict[str, str] = field(default_factory=dict)
    sampling_defaults: dict[str, int | float] = field(default_factory=dict)
    observers: list[StepObserver] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    """All that ever came."""
    aborted: list[str] = field(default_factory=list)
    is_alive: bool = True

    def __post_init__(self) -> None:
        self._running: set[str] = set()
        self.num_steps = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model_name="fake/model",
            architecture="fake",
            vocab_size=VOCAB_SIZE,
            limits=ReplicaLimits(
                device="cpu",
                max_model_len=self.max_model_len,
                max_num_seqs=64,
                num_blocks=1024,
                block_size=16,
            ),
            policy="sarathi",
            max_num_batched_tokens=2048,
            dtype="float32",
            priority_scheduling=self.priority_scheduling,
            speculation="ngram" if self.script.drafts_per_step else None,
            pooling=self.pooling,
            embedding_size=EMBEDDING_SIZE,
            generates=self.generates,
            left_out=self.left_out,
            sampling_defaults=self.sampling_defaults,
        )

    @property
    def pulse(self) -> EnginePulse:
        return EnginePulse(time.monotonic())

    def add_observer(self, observer: StepObserver) -> None:
        self.observers.append(observer)

    @property
    def running_ids(self) -> set[str]:
        return set(self._running)

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        if not self.is_alive:
            raise EngineDead("the engine process has ended")
        if self.script.reject is not None:
            raise self.script.reject
        self.requests.append(request)
        self._running.add(request.request_id)
        finished = False
        try:
            await asyncio.sleep(self.script.first_delay)
            async for delivery in self._deliveries(request):
                finished = delivery.output.finish_reason is not None
                yield delivery
        finally:
            if not finished:
                self.aborted.append(request.request_id)
            self._running.discard(request.request_id)

    async def _deliveries(self, request: Request) -> AsyncGenerator[Delivery, None]:
        scheduled = time.monotonic()
        for step, (token_ids, reason) in enumerate(self._steps(request)):
            await asyncio.sleep(self.script.seconds_per_step)
            if step == self.script.stall_after:
                await asyncio.Event().wait()
            if step == self.script.die_after:
                self.is_alive = False
            if not self.is_alive:
                raise EngineDead("the engine process has ended")
            failed = step == self.script.error_after
            if failed:
                reason, token_ids = FinishReason.ERROR, []
            output = RequestOutput(
                request_id=request.request_id,
                new_token_ids=token_ids,
                finish_reason=reason,
                stop_token_id=token_ids[-1] if token_ids and reason is FinishReason.STOP else None,
                num_cached_tokens=self.script.num_cached_tokens,
                scheduled_time=scheduled,
                logprobs=_logprobs(request, token_ids),
                prompt_logprobs=None if step else _prompt_logprobs(request),
                error="the step failed" if failed else None,
            )
            if request.pooling is not None and reason is FinishReason.STOP:
                output.embedding = counted(request.prompt_token_ids).tobytes()
            if self.script.drafts_per_step:
                output.num_drafted_tokens = (step + 1) * self.script.drafts_per_step
                output.num_accepted_tokens = (step + 1) * (self.script.tokens_per_step - 1)
            yield Delivery(self._observe(output, request), output)
            if reason is not None:
                return

    def _steps(self, request: Request) -> list[tuple[list[int], FinishReason | None]]:
        """Split the answer in steps; the last one has the finish reason."""
        if request.pooling is not None:
            return [([], FinishReason.STOP)]
        sampling = request.sampling
        if self.script.answers:
            self.script.text = self.script.answers.pop(0)
        token_ids = list(self.script.text.encode())
        reason = FinishReason.LENGTH
        if self.script.end and EOS in sampling.stop_token_ids:
            token_ids.append(EOS)
        else:
            token_ids *= math.ceil(sampling.max_tokens / len(token_ids))
        for i, token_id in enumerate(token_ids[: sampling.max_tokens]):
            if token_id in sampling.stop_token_ids and i + 1 >= sampling.min_tokens:
                token_ids, reason = token_ids[: i + 1], FinishReason.STOP
                break
        token_ids = token_ids[: sampling.max_tokens]
        size = self.script.tokens_per_step
        pieces = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
        return [(piece, reason if i == len(pieces) - 1 else None) for i, piece in enumerate(pieces)]

    def _observe(self, output: RequestOutput, request: Request) -> float:
        now = time.monotonic()
        shape = BatchShape()
        shape.add(len(request.prompt_token_ids), 1, samples=True)
        stats = StepStats(
            step_id=self.num_steps,
            start=now - 0.001,
            end=now,
            shape=shape,
            num_running=len(self._running),
            num_waiting=0,
            num_blocks=1024,
            num_used_blocks=4 * len(self._running),
            num_preemptions=0,
            num_prefix_queries=0,
            num_prefix_hits=0,
            schedule_seconds=0.0001,
            update_seconds=0.0001,
            drafts=self._drafts(),
        )
        self.num_steps += 1
        for observer in self.observers:
            observer.on_step(StepOutputs(now, [output], stats))
        return now

    def _drafts(self) -> DraftStats | None:
        """Return what a step verified: its first drafts were accepted."""
        num_drafts, num_accepted = self.script.drafts_per_step, self.script.tokens_per_step - 1
        if not num_drafts:
            return None
        return DraftStats(
            lengths=[0] * num_drafts + [1],
            drafted_at=[1] * num_drafts,
            accepted_at=[1] * num_accepted + [0] * (num_drafts - num_accepted),
            num_tokens=1 + num_accepted,
            expected_tokens=1.5,
        )


def _prompt_logprobs(request: Request) -> list[TokenLogprobs] | None:
    """Return reports in which the token of position p is the second likeliest, at -p."""
    number = request.num_prompt_logprobs
    if number is None:
        return None
    return [
        TokenLogprobs(
            token_id,
            -float(position),
            ((token_id + 1) % 256, token_id, (token_id + 2) % 256)[:number],
            (-0.5, -float(position), -math.inf)[:number],
            rank=2,
        )
        for position, token_id in enumerate(request.prompt_token_ids[1:], 1)
    ]


def _logprobs(request: Request, token_ids: Sequence[int]) -> list[TokenLogprobs] | None:
    number = request.sampling.num_logprobs
    if number is None:
        return None
    tops = [tuple((token_id + k) % 256 if k else token_id for k in range(number)) for token_id in token_ids]
    values = tuple(LOGPROB - k if k < 3 else -math.inf for k in range(number))
    return [
        TokenLogprobs(token_id, LOGPROB, top, values) for token_id, top in zip(token_ids, tops, strict=True)
    ]
