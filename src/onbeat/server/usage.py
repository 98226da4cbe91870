"""Count the tokens of an answer as OpenAI's `usage` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onbeat.server.generation import Choice


def usage_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the usage so far: each prompt counts once, however many choices it has.

    Without speculation the prediction tokens are 0, as OpenAI's own answers have them.
    """
    first_choices = {choice.prompt_index: choice for choice in reversed(choices)}.values()
    num_prompt = sum(len(choice.request.prompt_token_ids) for choice in first_choices)
    num_cached = sum(choice.num_cached_tokens for choice in first_choices)
    num_output = sum(choice.num_output_tokens for choice in choices)
    num_drafted = sum(choice.num_drafted_tokens for choice in choices)
    num_accepted = sum(choice.num_accepted_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_drafted - num_accepted,
        },
    }
