"""Offline generation and embeddings in this process: the same engine, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError, EngineError, InvalidRequest
from onbeat.core.options import make
from onbeat.core.request import FinishReason, Pooling, Request, RequestOutput, SamplingParams, TokenLogprobs
from onbeat.core.tokenizer import Tokenizer
from onbeat.engine.core import EngineCore
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.start import build_engine
from onbeat.hub.known import DEFAULT_MODEL
from onbeat.hub.resolve import find_stand_in, resolve_model
from onbeat.speculative_config import read_speculative_config
from onbeat.text.chat_template import load_chat_template
from onbeat.text.embedding import vector_of
from onbeat.text.stream import TextStream, holds_text
from onbeat.text.tokenizer import load_tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class Generation:
    """What came of one prompt."""

    prompt_token_ids: tuple[int, ...]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None


class LLM:
    """A model and an engine in this process.

    Parameters
    ----------
    model : path, known model or hub id, as for `onbeat serve`; None is the embedded model.
    speculative_config : what `--speculative-config` takes, as a mapping; None decodes without drafts.
    engine_options : settings of `EngineConfig` and its limits, such as `dtype`, `policy`, `max_model_len`.
        Nobody waits for an answer here, so that `max_queue_seconds` is 0, no limit, unless given.

    Examples
    --------
    >>> llm = LLM()
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].text  # doctest: +SKIP
    ' Paris.'
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        **engine_options: Any,
    ) -> None:
        if speculative_config is not None:
            engine_options["speculative"] = read_speculative_config(speculative_config)
        load_format, name = engine_options.get("load_format"), model or DEFAULT_MODEL
        if load_format == "stand-in":
            files = find_stand_in(name)
        else:
            files = resolve_model(name, needs_weights=load_format != "dummy")
        self.tokenizer: Tokenizer = load_tokenizer(files.path)
        self._chat_template = load_chat_template(self.tokenizer, None)
        config = make(EngineConfig, model=files, **{"max_queue_seconds": 0.0, **engine_options})
        if config.num_loras:
            raise ConfigError("LLM takes no LoRA adapters; serve them: onbeat serve --lora-modules NAME=PATH")
        self._core, self.info = build_engine(config, _ignore)
        self._num_requests = 0

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the engine's thread go."""
        self._core.shutdown()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's files recommend, as vLLM's method of this name does."""
        return SamplingParams(**dict[str, Any](self.info.sampling_defaults))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> list[Generation]:
        """Generate for all prompts at once; results come in their order.

        Parameters
        ----------
        prompts : one or several, each a text or token ids.
        sampling : how tokens are chosen; prompt i uses `seed + i`. None: `get_default_sampling_params`.
        stop : strings that end a text and are left out of it.
        ignore_eos : go on to `max_tokens` even if the model would end.

        Raises
        ------
        RequestRejected : a prompt cannot be served; none has been run.
        EngineError : the engine failed on a prompt.
        """
        token_ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        sampling = self._checked(sampling, ignore_eos=ignore_eos)
        return self._answers(token_ids, sampling, stop, continues_prompts=True)

    def chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, *, stop: Sequence[str] = ()
    ) -> Generation:
        """Answer one conversation, rendered with the model's chat template.

        Raises
        ------
        InvalidRequest : the model has no chat template.
        """
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template; use generate with a plain prompt")
        prompt = self._chat_template.render([dict(message) for message in messages])
        token_ids = self._encode(self.tokenizer.encode(prompt, add_special_tokens=False))
        sampling = self._checked(sampling, ignore_eos=False)
        return self._answers([token_ids], sampling, stop, continues_prompts=False)[0]

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, normalize: bool = True
    ) -> list[NDArray[np.float32]]:
        """Return the embeddings of all texts, in their order.

        Parameters
        ----------
        texts : one or several, each a text or token ids.
        dimensions : give the first numbers of each alone; None gives all.
        normalize : give each the length 1.

        Raises
        ------
        InvalidRequest : embeddings have fewer numbers.
        RequestRejected : a text cannot be served; none has been run.
        EngineError : the engine failed on a text.
        """
        if not self.info.embeds:
            raise InvalidRequest(
                "this engine makes no embeddings; choose backend='native', 'cuda' or 'torch'"
            )
        size, pooling = self.info.embedding_size, self.info.pooling
        if dimensions is not None and not 1 <= dimensions <= size:
            raise InvalidRequest(
                f"dimensions is {dimensions}; this model's embeddings have 1 to {size} numbers"
            )
        sampling = SamplingParams(max_tokens=1)
        requests = [self._request(self._encode(text), sampling, pooling) for text in _as_list(texts)]
        found: dict[str, bytes | None] = {request.request_id: None for request in requests}

        def take(output: RequestOutput) -> None:
            _check_output(output)
            found[output.request_id] = output.embedding

        _run(self._core, requests, take)
        return [vector_of(each, dimensions, normalize=normalize) for each in found.values()]

    def _answers(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        stop: Sequence[str],
        *,
        continues_prompts: bool,
    ) -> list[Generation]:
        """Add the requests, step until they end, and gather text."""
        requests: list[Request] = []
        answers: dict[str, tuple[Generation, TextStream]] = {}
        for index, prompt in enumerate(prompts):
            request = self._request(prompt, replace(sampling, seed=sampling.seed + index))
            stream = TextStream(
                self.tokenizer,
                continues_text=continues_prompts and holds_text(prompt, self.tokenizer),
                stop=stop,
                min_tokens=sampling.min_tokens,
            )
            requests.append(request)
            answers[request.request_id] = Generation(prompt), stream
        _run(self._core, requests, lambda output: _take(self._core, output, *answers[output.request_id]))
        return [generation for generation, _ in answers.values()]

    def _request(
        self, prompt: tuple[int, ...], sampling: SamplingParams, pooling: Pooling | None = None
    ) -> Request:
        self._num_requests += 1
        return Request(
            request_id=f"offline-{self._num_requests}",
            prompt_token_ids=prompt,
            sampling=sampling,
            arrival=time.monotonic(),
            pooling=pooling,
        )

    def _checked(self, sampling: SamplingParams | None, *, ignore_eos: bool) -> SamplingParams:
        sampling = sampling or self.get_default_sampling_params()
        if not ignore_eos:
            ends = (*sampling.stop_token_ids, *self.tokenizer.eos_token_ids)
            sampling = replace(sampling, stop_token_ids=ends)
        self.info.check_sampling(sampling)
        return sampling

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        for token_id in token_ids:
            if not 0 <= token_id < self.info.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary of {self.info.vocab_size} tokens",
                    param="prompt",
                )
        return tuple(token_ids)


def _take(core: EngineCore, output: RequestOutput, generation: Generation, stream: TextStream) -> None:
    """Add what is new of an answer, and end it at a stop string."""
    if generation.finish_reason is not None:
        return
    _check_output(output)
    generation.num_cached_tokens = output.num_cached_tokens
    generation.token_ids += output.new_token_ids
    if output.logprobs:
        generation.logprobs = (generation.logprobs or []) + output.logprobs
    is_final = output.finish_reason is not None
    # A stop token ends the text and is no part of it.
    visible = output.new_token_ids[:-1] if output.stop_token_id is not None else output.new_token_ids
    delta = stream.push(visible, final=is_final)
    generation.text += delta.text
    generation.finish_reason = output.finish_reason
    if delta.stop_string is not None:
        generation.finish_reason = FinishReason.STOP
        del generation.token_ids[stream.num_consumed_tokens :]  # a delivery may go on behind it
        if generation.logprobs:
            del generation.logprobs[stream.num_consumed_tokens :]
        core.abort([output.request_id])


def _run(core: EngineCore, requests: Sequence[Request], take: Callable[[RequestOutput], None]) -> None:
    """Step until all requests have ended.

    Raises
    ------
    RequestRejected : the engine refuses one.
    EngineError : `take` says that it failed on one.
    """
    try:
        for request in requests:
            core.add(request)
        while core.has_work:
            message = core.step()
            for output in message.outputs if message else ():
                take(output)
    finally:
        # After an error or Ctrl-C nothing of this call may stay behind in the engine.
        core.abort([request.request_id for request in requests])


def _check_output(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.ERROR:
        if output.error_code is not None:
            raise InvalidRequest(output.error or "", code=output.error_code)
        raise EngineError(output.error or "the engine failed on this request")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _ignore(_: str) -> None:
    """Report no progress: library code does not print."""
