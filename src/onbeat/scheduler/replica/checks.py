"""Which requests a replica does not take: those that it can never run, and those that find its queue full."""

from __future__ import annotations

from collections.abc import Reversible

from onbeat.core.errors import InvalidRequest, Overloaded, PromptTooLong, counted
from onbeat.core.request import Request
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.scheduler_config import SchedulerConfig


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Refuse a request that could never run here.

    Raises
    ------
    InvalidRequest : the prompt is empty, no token of the answer is left to generate, or more KV comes with it
        than it can have.
    PromptTooLong : the prompt, with what was generated of its answer, does not fit the context.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens; send at least one", param="prompt")
    if request.pooling is not None:
        _check_pooled(request, config)
    elif num_prompt_tokens >= config.max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens; with an output token this server takes "
            f"at most {config.max_model_len}. Shorten it or serve with a larger max_model_len"
        )
    num_tokens = num_prompt_tokens + len(request.resumed_token_ids)
    if request.resumed_token_ids:
        _check_resumed(request, config, num_tokens)
    if not 0 <= request.num_external_tokens < num_tokens:
        raise InvalidRequest(
            f"num_external_tokens is {request.num_external_tokens} of {num_tokens} tokens; at least the last "
            "one is computed here",
            param="num_external_tokens",
        )


def _check_pooled(request: Request, config: SchedulerConfig) -> None:
    """Refuse to embed what does not fit the context, all of which a prompt may take then."""
    num_tokens = len(request.prompt_token_ids)
    if num_tokens > config.max_model_len:
        raise PromptTooLong(
            f"the text has {num_tokens} tokens; this server takes at most {config.max_model_len}. Shorten it "
            "or serve with a larger max_model_len"
        )


def _check_resumed(request: Request, config: SchedulerConfig, num_tokens: int) -> None:
    """Refuse a stream of which nothing is left to generate, or not here."""
    num_resumed, max_tokens = len(request.resumed_token_ids), request.sampling.max_tokens
    if num_resumed >= max_tokens:
        raise InvalidRequest(
            f"the request is resumed with {num_resumed} output tokens, but max_tokens is {max_tokens}; "
            "resume only what has not ended",
            param="resumed_token_ids",
        )
    if num_tokens >= config.max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_tokens - num_resumed} tokens, and {num_resumed} of its answer were sent; "
            f"with another one this server takes at most {config.max_model_len}. Resume it where "
            "max_model_len is larger"
        )


def check_queue(
    request: Request, config: SchedulerConfig, *, num_places: int, num_waiting: int, num_tokens: int
) -> None:
    """Refuse a request that finds the queue full; of a whole request, all choices at once.

    What waits for the next step alone may fill the free places of the batch first.

    Parameters
    ----------
    num_places : that are free in the batch.
    num_waiting : requests that wait already.
    num_tokens : of the prompts that wait.

    Raises
    ------
    InvalidRequest : it has more choices than could run and wait here if it were alone.
    Overloaded : which limit is reached.
    """
    max_waiting, max_tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
    num_choices, num_prompt_tokens = 1, len(request.prompt_token_ids)
    if request.whole is not None:
        _, num_choices, num_prompt_tokens = request.whole
    if max_waiting is not None:
        if num_choices > config.max_num_seqs + max_waiting:
            raise InvalidRequest(
                f"the request has {num_choices} choices; here at most {config.max_num_seqs} run "
                f"(max_num_seqs) and {max_waiting} wait (max_num_queued_reqs). Ask for fewer at once",
                param="n",
                code="invalid_value",
            )
        if num_waiting + num_choices > max_waiting + max(num_places, 0):
            raise Overloaded(
                f"the queue is full: it holds {counted(num_waiting, 'request')}, this is {num_choices} more, "
                f"and at most {max_waiting} may wait (max_num_queued_reqs); try again later",
                code="server_overloaded",
            )
    if max_tokens is not None and num_tokens and num_tokens + num_prompt_tokens > max_tokens:
        raise Overloaded(
            f"the queue is full: it holds {counted(num_tokens, 'prompt token')}, this request has "
            f"{num_prompt_tokens}, and at most {max_tokens} may wait (max_num_queued_tokens); try "
            "again later",
            code="server_overloaded",
        )


def has_choice_in(states: Reversible[RequestState], request: Request) -> bool:
    """Return whether another choice of the same whole request was taken; it was among the last that came."""
    whole = request.whole
    if whole is None:
        return False
    others = (state.request.whole for state in reversed(states))
    return any(other is not None and other.whole_id == whole.whole_id for other in others)
