"""A request, how its tokens are sampled, and what comes back for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from math import ceil
from typing import Literal, NamedTuple

from onbeat.core.errors import InvalidRequest, Overloaded
from onbeat.core.hashing import BlockHash
from onbeat.core.slo import SLO, Fate, ShedMode


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the model's context was reached."""
    ABORT = "abort"
    """The client went away, or the server was told to stop."""
    ERROR = "error"
    """The engine failed on this request."""
    EXPIRED = "expired"
    """It was ended in the queue: `Fate.EXPIRED` or `Fate.OVERDUE`."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer's text must match; `text.grammar.source` makes one."""

    text: str
    """In llguidance's variant of Lark."""
    key: str
    """SHA-256 of the text, hex: stands for it in caches, logs and records, which hold nobody's schema."""
    field: str = ""
    """Where its request says so, for errors."""
    seconds: float = 3e-5
    """What a token of it takes on the host, as a trial found, or as most do."""

    @classmethod
    def of(cls, text: str) -> Grammar:
        """Return the grammar that a text is."""
        return cls(text, sha256(text.encode("utf-8", "surrogatepass")).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How output tokens are chosen.

    Raises
    ------
    InvalidRequest : a value is outside its range; `param` names the field.

    Notes
    -----
    Order of application: penalties, logit bias, banned tokens, grammar, temperature, min-p, top-k, top-p.
    The random stream depends on `seed` and the token's position alone, never on the batch.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches p, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one, in [0, 1]."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens may be sampled; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that the output must not contain: the last one is banned behind the others."""
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    """No stop or end-of-sequence token is sampled before this many output tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request: the caller's and, unless ignored, the model's end-of-sequence tokens."""
    num_logprobs: int | None = None
    """Report the sampled token's log-probability and this many alternatives; None reports nothing."""
    logprob_token_ids: tuple[int, ...] = ()
    """Report these tokens instead of the likeliest; needs `num_logprobs`."""
    grammar: Grammar | None = None
    """What the answer must match; it ends where the grammar allows nothing more. None allows any text."""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                message = f"{name} is {value}; it must be between {low:g} and {high:g}"
                raise InvalidRequest(message, param=name)
        if self.top_p == 0 or self.repetition_penalty == 0:
            name = "top_p" if self.top_p == 0 else "repetition_penalty"
            raise InvalidRequest(f"{name} is 0; it must be greater than 0", param=name)
        if self.min_tokens > self.max_tokens:
            text = f"min_tokens ({self.min_tokens}) is above {{field}} ({self.max_tokens})"
            raise InvalidRequest(text, param="min_tokens", field="max_tokens")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that `min_tokens` leaves a token of a vocabulary to sample.

        Raises
        ------
        InvalidRequest : every token that may be sampled is a stop token, which `min_tokens` holds back.
        """
        num_allowed = len(set(self.allowed_token_ids)) or vocab_size
        if not self.min_tokens or len(self.stop_token_ids) < num_allowed:
            return
        if not set(self.allowed_token_ids or range(vocab_size)).difference(self.stop_token_ids):
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, but all {num_allowed} tokens that may be sampled are stop "
                "tokens; stop at fewer of them, or leave min_tokens out",
                param="min_tokens",
            )


_MANY = float(2**31)
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (0, _MANY),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 100),
    "max_tokens": (1, _MANY),
    "min_tokens": (0, _MANY),
    "num_logprobs": (0, _MANY),
}
"""Smallest and largest value of each field, both allowed (OpenAI's ranges; vLLM's for its extras)."""


class WholeRequest(NamedTuple):
    """What a client sent at once, of which each choice is a `Request`: a queue takes all of it or nothing."""

    whole_id: str
    num_choices: int
    num_prompt_tokens: int
    """Of all choices together."""

    def share(self, num_replicas: int) -> WholeRequest:
        """Return what comes to each of several replicas that share the choices evenly."""
        number = max(num_replicas, 1)
        return self._replace(
            num_choices=ceil(self.num_choices / number),
            num_prompt_tokens=ceil(self.num_prompt_tokens / number),
        )


class Adapter(NamedTuple):
    """A LoRA adapter, as an engine loads it beside its model."""

    name: str
    """By which requests ask for it."""
    path: str
    """Folder of its files."""
    number: int
    """From 1: another one each time that an adapter is loaded, also under a name that there was before."""


Pooling = Literal["last", "mean", "cls"]
"""How a prompt becomes one vector: by its last token, all (`mean`) or the first (`cls`, vLLM alone)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate: token ids in, token ids out; or to embed: token ids in, one vector out.

    Times are seconds of the machine's monotonic clock.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    """A tuple; where only the length matters (simulation), a `range`."""
    resumed_token_ids: Sequence[int] = ()
    """Output tokens that its client has already, from a replica that died. They are computed like a prompt,
    count as output everywhere else, and are not delivered again. Such a request is never refused or ended for
    want of capacity."""
    first_token_time: float | None = None
    """When the first of `resumed_token_ids` was delivered; None: when it was due, else on arrival."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0
    """When the whole request had been received."""
    priority: int = 0
    """Lower is served earlier; only the priority order looks at it."""
    num_prompt_logprobs: int | None = None
    """Report the log-probability of each prompt token but the first, with this many alternatives; None
    reports nothing. Such a prompt is computed whole: the prefix cache has no logits."""
    cache_salt: str | None = None
    """Requests with different salts never share prefix-cache blocks."""
    adapter: Adapter | None = None
    """The LoRA adapter that it asks for; those with different ones never share blocks either. None: none."""
    block_hashes: Sequence[BlockHash] | None = None
    """Hashes of its full blocks (prompt, then output), where the tokens themselves are not known.

    A simulation or a replay gives them; blocks beyond the last are not shared. None: the tokens are hashed.
    """
    num_external_tokens: int = 0
    """Leading tokens whose KV has come from another replica; such a request is adopted, not added."""
    slo: SLO | None = None
    """Its objectives; None where it has none. Only policies that plan with deadlines look at it."""
    slo_class: str | None = None
    """Name of its class of objectives."""
    weight: float = 1.0
    """Worth of keeping its objectives beside those of others, above 0; the larger, the more important."""
    caller: str = ""
    """Who asks, as far as it is known and not merely claimed: callers share the server's own time evenly."""
    tenant: str | None = None
    """Shares scarce capacity fairly with other tenants; None is one tenant of its own."""
    whole: WholeRequest | None = None
    """Of which it is one choice of several; None where it is all that its client asked for."""
    resumes: bool = True
    """Whether another replica goes on with it where its own is lost; else it ends with an error then."""
    shed: ShedMode = ShedMode.RELEGATE
    """What to do where its TTFT objective is predicted to be missed."""
    kept_for: float = 0.0
    """Seconds for which its KV is kept after its end, for one that goes on with it, if there is room."""
    pooling: Pooling | None = None
    """How its prompt becomes its embedding; None generates tokens. A request with an embedding has no output
    token: its only delivery is the embedding, which is what its TTFT objective is about. `sampling` has
    `max_tokens` 1 then, and nothing else in it matters."""


UNKNOWN_GRAMMAR = Grammar("", "")
"""Of a request that is simulated or replayed: only that there is one matters."""
GRAMMAR_FAULT = "grammar_too_complex"
"""`RequestOutput.error_code` of a request whose grammar cannot be followed any further."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural, of the unmodified distribution) at one position of output or prompt."""

    token_id: int
    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int | None = None
    """Place of the token among all by likelihood, from 1; of prompt tokens alone."""


class Placement(NamedTuple):
    """Which replica of a fleet a request was sent to."""

    replica: str
    why: str
    """As of `RoutingChoice.why`, or `waited`."""


@dataclass(slots=True)
class RequestOutput:
    """What one step delivered to one request: a *delivery*."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the request; None when the model's length or a string ended it."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held when the request was first scheduled."""
    num_preemptions: int = 0
    scheduled_time: float = 0.0
    """When the request was first put in a step."""
    num_previous_tokens: int = 0
    """Output tokens before the new ones, those of other replicas included: a gap or a repeat shows."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of each prompt token but the first; with the first output token alone, where they were asked for."""
    error: str | None = None
    """Set with `FinishReason.ERROR` and `FinishReason.EXPIRED`: what went wrong."""
    error_code: str | None = None
    """Set where the request is at fault, and not the engine: the code of the API's error."""
    predicted_ttft: float | None = None
    """TTFT that was predicted at the request's arrival, seconds; set on its first output alone."""
    fate: Fate | None = None
    """`RELEGATED`: by now. `EXPIRED` or `OVERDUE`: with `FinishReason.EXPIRED`. None: as any other."""
    num_drafted_tokens: int = 0
    """Draft tokens verified for the request so far."""
    num_accepted_tokens: int = 0
    """Of these, tokens that became output."""
    retry_after: float | None = None
    """Set with `Fate.OVERDUE`: seconds after which another is predicted to be taken."""
    placement: Placement | None = None
    """Set by a fleet on the first output of a request, and on the first of another replica."""
    embedding: bytes | None = None
    """The pooled hidden state of a request with `pooling`, as it is: float32, little-endian."""


def overdue_error(output: RequestOutput) -> Overloaded:
    """Return what the caller of a request hears that was ended as overdue."""
    message = output.error or "too many requests wait"
    return Overloaded(message, retry_after=output.retry_after, reason="queue_too_long")
