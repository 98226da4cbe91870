"""What the routes work with, made once when the application is."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onbeat import __version__
from onbeat.core.protocols import EngineClient, EngineInfo, Tokenizer
from onbeat.core.request import Request, SamplingParams
from onbeat.server.answer_head import AnswerHead
from onbeat.server.body import unknown_model
from onbeat.server.config import ServerConfig
from onbeat.server.generation import Choice, Generator
from onbeat.server.lifecycle import EngineWatch, Lifecycle
from onbeat.server.objectives import RequestObjectives
from onbeat.server.prompts import PromptEncoder
from onbeat.server.sampling_fields import SamplingFields, seed_of_choice
from onbeat.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts that the routes share."""

    engine: EngineClient
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    config: ServerConfig
    lifecycle: Lifecycle
    encoder: PromptEncoder
    generator: Generator
    watch: EngineWatch
    created: int
    """Unix time at which the server started, seconds."""

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which the model answers, the preferred first."""
        return self.config.served_model_names or (self.info.model_name,)

    def check_model(self, name: str | None) -> str:
        """Return the name under which to answer.

        Raises
        ------
        ApiError : another model was asked for (404).
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise unknown_model(name, self.model_names)
        return name

    def new_head(self, prefix: str, model: str) -> AnswerHead:
        """Return the head of a new answer with an id of its own."""
        return AnswerHead(
            completion_id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            fingerprint=f"onbeat-{__version__}",
        )


def make_choices(
    fields: SamplingFields,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    *,
    completion_id: str,
    arrival: float,
    objectives: RequestObjectives,
) -> list[Choice]:
    """Return `n` choices for each prompt; each is a request of its own to the engine.

    Parameters
    ----------
    fields : the caller's.
    prompts, samplings : token ids of each prompt and how to sample its first choice.
    completion_id : the answer's id; the requests' ids start with it.
    arrival : when the whole request had been received.
    objectives : of each choice.
    """
    choices: list[Choice] = []
    is_single = len(prompts) * fields.num_choices == 1
    for prompt_index, (token_ids, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        prompt_token_ids = tuple(token_ids)
        for choice in range(fields.num_choices):
            index = len(choices)
            request = Request(
                request_id=completion_id if is_single else f"{completion_id}-{index}",
                prompt_token_ids=prompt_token_ids,
                sampling=replace(sampling, seed=seed_of_choice(sampling.seed, choice))
                if choice
                else sampling,
                arrival=arrival,
                priority=fields.priority or 0,
                cache_salt=fields.cache_salt,
                slo=objectives.slo,
                slo_class=objectives.slo_class,
                weight=objectives.weight,
                tenant=objectives.tenant,
                shed=objectives.shed,
            )
            choices.append(
                Choice(
                    index=index, prompt_index=prompt_index, request=request, is_streamed=bool(fields.stream)
                )
            )
    return choices
