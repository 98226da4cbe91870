"""Configuration of speculative decoding, with vLLM's keys; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import msgspec

from onbeat.core.errors import ConfigError
from onbeat.core.options import option
from onbeat.files import parse_object
from onbeat.scheduler.scheduler_config import DraftLength, SpeculationConfig
from onbeat.typed import Size, Table, Text, convert

Method = Literal["ngram", "draft-model", "grammar", "eagle", "eagle3", "mtp"]
METHODS: tuple[str, ...] = get_args(Method)
TRAINED: tuple[Method, ...] = ("eagle", "eagle3", "mtp")
"""Methods whose drafts come from weights that were trained for one target: vLLM's workers alone have them."""

MAX_CATCH_UP_TOKENS = 256
"""Most tokens that a step lets a draft model catch up with, over all rows that are far behind. A row that
is not through proposes nothing in this step and goes on in the next, so that a long prompt, or many at once,
costs several steps a little and none of them much."""
DEFAULT_DRAFTS: Mapping[Method, int] = {
    "ngram": 12,
    "draft-model": 4,
    "grammar": 12,
    **dict.fromkeys(TRAINED, 3),
}
"""Most drafts of a request where the user names none: looked up, they cost only their verification."""
DEFAULT_LOOKUP_MAX = 5
DEFAULT_LOOKUP_MIN = 2

_OWN_KEYS: Mapping[str, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "draft-model": ("model",),
    "grammar": (),
    **dict.fromkeys(TRAINED, ("model",)),
}
_NEEDS_TRAINED_HEADS = ("eagle", "medusa", "mtp", "mlp_speculator", "dflash", "dspark")
"""Other methods of vLLM, or parts of their names, whose drafts come from weights trained for one target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """What proposes draft tokens, and how many at most."""

    method: Method
    """`ngram`: what followed the same tokens earlier in the request (prompt lookup). `draft-model`: a smaller
    model with the same tokenizer. `grammar`: only text that an answer's grammar prescribes, which the others
    draft too. With vLLM's workers alone, `eagle`, `eagle3` and `mtp`: weights trained for the model."""
    num_speculative_tokens: int
    """Most drafts of a request in one step."""
    draft_length: DraftLength = "adaptive"
    """`adaptive`: as many as give the most tokens per second under the current load, down to none.
    `fixed`: always the most."""
    model: str | None = None
    """Of `draft-model`, `eagle` and `eagle3`: path, known model or hub id."""
    prompt_lookup_max: int = DEFAULT_LOOKUP_MAX
    """Of `ngram`: most tokens that must have occurred before, tried first."""
    prompt_lookup_min: int = DEFAULT_LOOKUP_MIN
    """Of `ngram`: fewest, tried last."""

    def __post_init__(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is above prompt_lookup_max "
                f"({self.prompt_lookup_max}); lower the first or raise the second"
            )
        if self.method in ("draft-model", "eagle", "eagle3") and not self.model:
            kind = "a smaller model with the same tokenizer"
            if self.method in TRAINED:
                kind = "weights that were trained for this model"
            raise ConfigError(
                f"method {self.method!r} needs the key 'model': a path, known model or hub id of {kind}"
            )

    @property
    def runs_model(self) -> bool:
        """Whether drafts take forward passes."""
        return self.method not in ("ngram", "grammar")

    def for_scheduler(self, *, is_ahead: bool = False) -> SpeculationConfig:
        """Return what the scheduler must know of this.

        Parameters
        ----------
        is_ahead : whether each step makes the drafts of the next one, whether or not that verifies them.
        """
        runs_model = self.runs_model and not is_ahead
        return SpeculationConfig(
            num_speculative_tokens=self.num_speculative_tokens,
            draft_length=self.draft_length,
            runs_model=runs_model,
            max_catch_up_tokens=MAX_CATCH_UP_TOKENS if runs_model else 0,
            num_lookahead_tokens=self.num_speculative_tokens if self.runs_model and is_ahead else 0,
        )


def speculative_option(group: str) -> Any:
    """Return the field of what drafts are made by; None plans no drafts."""
    return option(
        None,
        flag="--speculative-config",
        group=group,
        parse=parse_speculative_config,
        metavar="JSON",
        help=f"draft tokens ahead and verify them together: method ({', '.join(METHODS)}), "
        "num_speculative_tokens, draft_length (adaptive to the load, or fixed), model, prompt_lookup_max, "
        'prompt_lookup_min; such as \'{"method": "ngram"}\'',
    )


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Read a configuration from JSON, such as '{"method": "ngram", "num_speculative_tokens": 5}'.

    Raises
    ------
    ConfigError : it is no JSON object, or as `read_speculative_config`.
    """
    hint = '; write it such as \'{"method": "ngram", "num_speculative_tokens": 5}\''
    return read_speculative_config(parse_object(text, "the speculative config", hint))


class _Given(Table):
    method: str | None = None
    num_speculative_tokens: Size | None = None
    draft_length: DraftLength | None = None
    prompt_lookup_max: Size | None = None
    prompt_lookup_min: Size | None = None
    model: Text | None = None


def read_speculative_config(content: Mapping[str, Any]) -> SpeculativeConfig:
    """Read a configuration from vLLM's keys; what is left out has defaults.

    As in vLLM, a `model` without a `method` is a draft model, and underscores in a method's name are dashes.

    Raises
    ------
    ConfigError : a key or method is unknown, does not belong to the method, or has an impossible value.
    """
    stated = convert(_Given, dict(content), "the speculative config")
    given = {key: value for key, value in msgspec.structs.asdict(stated).items() if value is not None}
    method = _method(given)
    for owner, keys in _OWN_KEYS.items():
        for key in given.keys() & set(keys) - set(_OWN_KEYS[method]):
            raise ConfigError(f"key {key!r} belongs to method {owner!r}, not to {method!r}; leave it out")
    options = given | {"method": method}
    options.setdefault("num_speculative_tokens", DEFAULT_DRAFTS[method])
    # Either bound alone moves the other where it must.
    if "prompt_lookup_min" not in options and "prompt_lookup_max" in options:
        options["prompt_lookup_min"] = min(DEFAULT_LOOKUP_MIN, options["prompt_lookup_max"])
    if "prompt_lookup_max" not in options and "prompt_lookup_min" in options:
        options["prompt_lookup_max"] = max(DEFAULT_LOOKUP_MAX, options["prompt_lookup_min"])
    return SpeculativeConfig(**options)


def _method(given: Mapping[str, Any]) -> Method:
    """Return the method that was asked for, spelled our way."""
    if "method" not in given:
        if "model" in given:
            return "draft-model"
        raise ConfigError(
            f"the speculative config lacks the key 'method'; choose one of {', '.join(METHODS)}"
        )
    name = given["method"]
    spelled = name.replace("_", "-")
    if spelled in METHODS:
        return cast("Method", spelled)
    if any(part in name.lower() for part in _NEEDS_TRAINED_HEADS):
        raise ConfigError(
            f"speculative method {name!r} needs weights that were trained with the model, which onbeat does "
            f"not support; choose one of {', '.join(METHODS)}"
        )
    raise ConfigError(f"unknown speculative method {name!r}; choose one of {', '.join(METHODS)}")
