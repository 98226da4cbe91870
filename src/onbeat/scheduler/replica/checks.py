"""Which requests a replica can never run."""

from __future__ import annotations

from onbeat.core.errors import InvalidRequest, Overloaded, PromptTooLong
from onbeat.core.request import Request
from onbeat.scheduler.config import SchedulerConfig


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
    if num_prompt_tokens >= config.max_model_len:
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


def check_queue(request: Request, config: SchedulerConfig, *, num_requests: int, num_tokens: int) -> None:
    """Refuse a request that finds the queue full.

    Parameters
    ----------
    num_requests, num_tokens : that wait already.

    Raises
    ------
    Overloaded : which limit is reached.
    """
    max_requests, max_tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
    if max_requests is not None and num_requests >= max_requests:
        raise Overloaded(
            f"{num_requests} requests are waiting, as many as may (max_num_queued_reqs); try again later",
            code="server_overloaded",
        )
    num_prompt_tokens = len(request.prompt_token_ids)
    if max_tokens is not None and num_tokens and num_tokens + num_prompt_tokens > max_tokens:
        raise Overloaded(
            f"{num_tokens} tokens are waiting; with the {num_prompt_tokens} of this prompt they would be "
            f"more than may (max_num_queued_tokens {max_tokens}); try again later",
            code="server_overloaded",
        )
