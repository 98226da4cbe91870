"""A load with its texts: what a server is sent, and the runs that a command makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError, counted
from onbeat.core.options import changed, option, settings_of
from onbeat.files import read_lines
from onbeat.typed import Text
from onbeat.workload.arrivals import MOST_TOKENS, Arrivals
from onbeat.workload.load import FILE_LOADS, CountTokens, Load, SharedName
from onbeat.workload.offered import OfferedLoad, have_traces
from onbeat.workload.prompts import BlockPrompts, FreshPrompts, PromptSource, PromptWriter
from onbeat.workload.slo_classes import SLOClass

TEXT_DATASETS = frozenset({"sharegpt", "custom"})
"""Those that bring their own prompts, whose length only a tokenizer can tell."""

_data = partial(option, group="data set")
_load = partial(option, group="load")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad(Load):
    """A load that is sent to a server: its words too."""

    DEFAULT_RATE: ClassVar[float] = inf
    MOST_OF_FILE: ClassVar[int | None] = 1000
    FILES: ClassVar[frozenset[str]] = FILE_LOADS | {"custom"}
    FOR: ClassVar[dict[str, tuple[str, ...]]] = {
        **{name: owners for name, owners in Load.FOR.items() if name != "tokenizer"},
        **dict.fromkeys(("random_prefix_len", "random_long_share", "random_long_input_len"), ("random",)),
        **dict.fromkeys(
            (
                *("prefix_repetition_prefix_len", "prefix_repetition_suffix_len"),
                "prefix_repetition_num_prefixes",
            ),
            ("prefix_repetition",),
        ),
    }

    dataset_name: Literal[SharedName, "prefix_repetition", "custom"] | None = _data(  # type: ignore[assignment]
        None, help="data set of requests (default: random)"
    )
    random_prefix_len: int = _data(0, at_least=0, help="tokens that all prompts of random share")
    random_long_share: float = _data(
        0.0,
        metavar="X",
        at_least=0,
        below=1,
        help="share of random's requests that have long prompts",
    )
    random_long_input_len: int | None = _data(
        None,
        metavar="N",
        at_least=1,
        at_most=MOST_TOKENS,
        help="tokens of these long prompts (default: 1500)",
    )
    prefix_repetition_prefix_len: int = _data(256, at_least=1, help="tokens of each repeated prefix")
    prefix_repetition_suffix_len: int = _data(256, at_least=1, help="tokens after the prefix")
    prefix_repetition_num_prefixes: int = _data(10, at_least=1, help="different prefixes")
    salt: str | None = _data(
        None, help="random seed of the words (default: new each time, so that no prefix cache helps)"
    )
    num_warmups: int = _load(0, at_least=0, metavar="N", help="unmeasured requests before each run")
    sweep_concurrency: tuple[int, ...] = _load(
        (), many=",", at_least=1, metavar="N,N,...", help="run a closed loop for each concurrency"
    )
    sweep_rate: tuple[float, ...] = _load(
        (), many=",", metavar="R,R,...", help="run an open loop for each request rate"
    )

    def __post_init__(self) -> None:
        Load.__post_init__(self)
        if self.random_long_input_len is not None and not self.random_long_share:
            raise ConfigError("--random-long-input-len needs --random-long-share")
        if self.random_long_share and self.random_prefix_len:
            raise ConfigError("--random-long-share and --random-prefix-len do not go together: leave one out")

    def _check_kind(self) -> None:
        if not self.sweep_rate:  # else with each of its rates
            Load._check_kind(self)

    def runs(self, title: str) -> list[RunConfig]:
        """Return the runs of sweeps: a closed loop for each concurrency, an open one for each rate.

        Returns
        -------
        One run where there are no sweeps.

        Raises
        ------
        ConfigError : settings that a sweep would override.
        """
        levels, rates = self.sweep_concurrency, self.sweep_rate
        given = {each.name: each for each in changed(self) if each.name in _ARRIVALS}
        if levels and (own := given if not rates else given.keys() & {"max_concurrency"}):
            flag = given[next(iter(own))].flag
            raise ConfigError(f"--sweep-concurrency makes closed loops, one for each: leave out {flag}")
        if rates and self.request_rate is not None:
            raise ConfigError("--sweep-rate sets --request-rate itself: leave one out")
        runs = [(f"c={level}", self.closed(level)) for level in levels]
        runs += [(f"{rate:g} req/s", replace(self, request_rate=rate, **_NO_SWEEP)) for rate in rates]
        return [
            RunConfig(load=load, classes=self.classes(), title=f"{title} {name}".strip())
            for name, load in runs or [("", self)]
        ]

    def closed(self, concurrency: int) -> BenchLoad:
        """Return the same requests in a closed loop."""
        usual = {each.name: each.default for each in changed(self) if each.name in _ARRIVALS}
        return replace(self, **_NO_SWEEP | usual | {"max_concurrency": concurrency})

    def requests(
        self, rng: np.random.Generator, count_tokens: CountTokens | None
    ) -> tuple[OfferedLoad, NDArray[np.float64] | None]:
        if self.dataset_name == "custom":
            assert count_tokens is not None, "who sends texts can measure them"
            return self._custom(count_tokens), None
        if self.dataset_name == "prefix_repetition":
            size, num_prefixes = self.num_prompts or 1000, self.prefix_repetition_num_prefixes
            if size < num_prefixes:
                raise ConfigError(f"{num_prefixes} prefixes need at least as many prompts, got {size}")
            num_tokens = self.prefix_repetition_prefix_len + self.prefix_repetition_suffix_len
            return OfferedLoad(
                name="prefix_repetition",
                num_prompt_tokens=np.full(size, num_tokens),
                num_output_tokens=np.full(size, self.output_len or 128),
            ), None
        load, times = Load.requests(self, rng, count_tokens)
        prompts = load.num_prompt_tokens + self.random_prefix_len
        prompts[every_nth(len(load), self.random_long_share)] = self.random_long_input_len or 1500
        return replace(load, num_prompt_tokens=prompts), times

    def _custom(self, count_tokens: CountTokens) -> OfferedLoad:
        """Read JSON lines ``{"prompt": str, "output_tokens": int}``; the count may be --output-len."""
        assert self.dataset_path is not None
        hint = '; a line is {"prompt": text, "output_tokens": count}'
        found = [each for _, each in read_lines(_Prompt, self.dataset_path, hint=hint)]
        if self.num_prompts is not None and self.num_prompts > len(found):
            raise ConfigError(
                f"{self.dataset_path} has {counted(len(found), 'prompt')}, and --num-prompts is "
                f"{self.num_prompts}"
            )
        usual = self.output_len or 128
        texts = [each.prompt for each in found[: self.num_prompts]]
        outputs = [each.output_tokens or usual for each in found[: self.num_prompts]]
        return OfferedLoad(
            name="custom",
            num_prompt_tokens=np.array([max(1, count_tokens(text)) for text in texts], dtype=np.int64),
            num_output_tokens=np.array(outputs, dtype=np.int64),
            texts=texts,
        )


class _Prompt(msgspec.Struct):
    prompt: Text
    output_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTools:
    """What prompts are made and measured with."""

    writer: PromptWriter
    count_tokens: Callable[[str], int]
    keeps_text: bool = False
    """Whether answers stay in the records."""


def prompts_of(load: BenchLoad, offered: OfferedLoad, writer: PromptWriter) -> PromptSource:
    """Return what makes the prompts of an offered load."""
    num_tokens, prefix, groups = offered.num_prompt_tokens.tolist(), load.random_prefix_len, None
    if load.dataset_name == "prefix_repetition":
        prefix = load.prefix_repetition_prefix_len
        drawn = np.arange(len(offered)) % load.prefix_repetition_num_prefixes
        np.random.default_rng([load.seed, 0]).shuffle(drawn)
        groups = drawn.tolist()
    if offered.block_ids is not None:
        return BlockPrompts(
            writer=writer,
            num_tokens=num_tokens,
            block_ids=offered.block_ids,
            block_size=offered.block_size,
        )
    usual: PromptSource = FreshPrompts(
        writer=writer, num_tokens=num_tokens, num_prefix_tokens=prefix, prefix_groups=groups
    )
    if offered.texts is not None:
        usual = offered.texts.__getitem__
    if not have_traces(offered.classes):
        return usual
    has_trace = np.array([each.trace is not None for each in offered.classes])
    own = FreshPrompts(writer=writer, num_tokens=num_tokens)
    is_own = has_trace[offered.class_ids].tolist()
    return lambda index: (own if is_own[index] else usual)(index)


def every_nth(num_requests: int, share: float) -> NDArray[np.bool_]:
    """Return a flag a request: of any first k requests, floor(k * share) have it.

    Evenly spread rather than drawn, so that a short run has the share it was asked for, and two runs meet
    the long prompts at the same places.
    """
    # A share such as 0.1 is a little below a tenth in binary: without the nudge the tenth would be missed.
    so_far = np.floor(np.arange(num_requests + 1) * share + 1e-9)
    return np.asarray(np.diff(so_far) > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One measured run."""

    load: BenchLoad
    classes: tuple[SLOClass, ...] = ()
    """Objectives by share of the requests."""
    title: str = ""
    """What sets this run apart from others in a sweep, for tables and plots."""


_NO_SWEEP: dict[str, Any] = {"sweep_rate": (), "sweep_concurrency": ()}
_ARRIVALS = frozenset(each.name for each in settings_of(Arrivals))
