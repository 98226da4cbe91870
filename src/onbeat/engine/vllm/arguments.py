"""What users and requests ask of vLLM, in its words."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from onbeat.core.errors import ConfigError
from onbeat.core.request import SamplingParams
from onbeat.hub.files import ModelFiles
from onbeat.speculative_config import SpeculativeConfig


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the fields of vLLM's `EngineArgs` that flags of its command line set.

    Raises
    ------
    ConfigError : vLLM does not take a flag or its value; with its own reason.
    """
    if not arguments:
        return {}
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Flags(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"vLLM {vllm.__version__} does not take what stands behind `--`: {message}")

    parser = EngineArgs.add_cli_args(Flags(prog="vllm", add_help=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # so that it is known which were given
    return dict(vars(parser.parse_args(list(arguments))))


def speculation_of(speculative: SpeculativeConfig, draft: ModelFiles | None) -> dict[str, Any]:
    """Return what makes drafts, in vLLM's words.

    Parameters
    ----------
    draft : where the weights lie that make them; None where no others than the model's do.
    """
    theirs: dict[str, Any] = {
        "method": speculative.method.replace("-", "_"),
        "num_speculative_tokens": speculative.num_speculative_tokens,
    }
    if draft is not None:
        theirs["model"] = str(draft.path)
    if speculative.method == "ngram":
        theirs["prompt_lookup_max"] = speculative.prompt_lookup_max
        theirs["prompt_lookup_min"] = speculative.prompt_lookup_min
    return theirs


def sampling_params(
    params: SamplingParams, num_prompt_logprobs: int | None, *, takes_seeds: bool = True
) -> Any:
    """Return how tokens are chosen, in vLLM's words; where a request ends is onbeat's to say.

    Parameters
    ----------
    takes_seeds : False where vLLM fails with a seed: on a CPU, at a chunk of a prompt.
    """
    from vllm import SamplingParams as Theirs

    theirs = Theirs(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed if takes_seeds else None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias) or None,
        allowed_token_ids=list(params.allowed_token_ids) or None,
        min_tokens=params.min_tokens,
        max_tokens=params.max_tokens,
        stop_token_ids=list(params.stop_token_ids),
        logprobs=params.num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
        logprob_token_ids=list(params.logprob_token_ids) or None,
    )
    theirs._bad_words_token_ids = [list(each) for each in params.bad_words] or None
    return theirs
