"""A load: what is asked, when, and with which objectives; its flags, and the requests that it comes to.

Names are those of `vllm bench serve` wherever it has the flag.

Of conversations in the ShareGPT format the first question is asked, and the length of the first answer is
generated. The file is a JSON list, or one a line, of
``{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError, counted
from onbeat.core.options import changed, check, option, part
from onbeat.core.slo import OBJECTIVES, SLO, SLO_CLASSES
from onbeat.files import json_lines, read_text
from onbeat.typed import decode
from onbeat.workload.arrivals import MOST_TOKENS, Arrivals, Lengths, LogNormalLength, UniformLength
from onbeat.workload.job import Job, read_jobs
from onbeat.workload.job_kinds import (
    JOB_KINDS,
    LANE_CLASSES,
    LANES,
    JobKind,
    draw_jobs,
    given_starts,
    job_load,
    lane_load,
)
from onbeat.workload.offered import OfferedLoad, Overlong, check_num_requests, have_traces
from onbeat.workload.slo_classes import SLOClass, built_in_slo, read_slo_config
from onbeat.workload.trace import TIMED_KINDS, Trace, TraceKind, read_trace

MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer."""

    question: str
    answer: str


def read_sharegpt(path: Path) -> list[Exchange]:
    """Return the first exchange of each conversation that has at least two turns.

    Raises
    ------
    ConfigError : the file cannot be read or is not in the ShareGPT format.
    """
    hint, text = "; give a file in the ShareGPT format", read_text(path)
    if text.lstrip().startswith("{"):
        conversations = [each for _, each in json_lines(_Conversation, path, text, hint=hint)]
    else:
        conversations = decode(list[_Conversation], text, str(path), hint=hint)
    found = (each.conversations or each.conversation or () for each in conversations)
    return [Exchange(turns[0].value, turns[1].value) for turns in found if len(turns) > 1]


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: tuple[_Turn, ...] | None = None
    conversation: tuple[_Turn, ...] | None = None

    def __post_init__(self) -> None:
        if self.conversations is None and self.conversation is None:
            raise ValueError("it has no conversations, a list of turns that have a value")


def sharegpt_load(
    exchanges: Sequence[Exchange],
    *,
    num_requests: int,
    output_len: int | None,
    count_tokens: Callable[[str], int],
    order: np.random.Generator | None,
) -> OfferedLoad:
    """Return requests that ask the recorded questions for answers as long as the recorded ones.

    Very short exchanges (below 4 tokens) and long ones (a prompt above 1,024 or a sum above 2,048 tokens)
    are passed over, as is usual with this data set.

    Parameters
    ----------
    output_len : length of all answers; None takes the recorded ones.
    order : draws the order of the conversations; None keeps the file's.

    Raises
    ------
    ConfigError : fewer usable conversations than requests.
    """
    positions = np.arange(len(exchanges)) if order is None else order.permutation(len(exchanges))
    prompts: list[str] = []
    lengths: list[tuple[int, int]] = []
    for position in positions.tolist():
        exchange = exchanges[position]
        num_prompt, num_answer = count_tokens(exchange.question), count_tokens(exchange.answer)
        if _is_usable(num_prompt, output_len or num_answer, has_fixed_output=output_len is not None):
            prompts.append(exchange.question)
            lengths.append((num_prompt, output_len or num_answer))
        if len(prompts) == num_requests:
            break
    if len(prompts) < num_requests:
        raise ConfigError(
            f"the ShareGPT file has {len(prompts)} usable conversations (of {len(exchanges)}), "
            f"{num_requests} were asked for with --num-prompts"
        )
    return OfferedLoad(
        name="sharegpt",
        num_prompt_tokens=np.array([prompt for prompt, _ in lengths], dtype=np.int64),
        num_output_tokens=np.array([output for _, output in lengths], dtype=np.int64),
        texts=tuple(prompts),
    )


def _is_usable(num_prompt: int, num_output: int, *, has_fixed_output: bool) -> bool:
    if num_prompt < MIN_TOKENS or (num_output < MIN_TOKENS and not has_fixed_output):
        return False
    return num_prompt <= MAX_PROMPT_TOKENS and num_prompt + num_output <= MAX_TOTAL_TOKENS


SharedName = Literal["random", "conversation", "sharegpt", TraceKind, "jobs", JobKind]
"""Data sets that are simulated and sent."""
LoadName = Literal[SharedName, "lanes"]
CountTokens = Callable[[str], int]

JOB_LOADS = frozenset({"jobs", *JOB_KINDS})
"""Those of calls that depend on one another: numbers and rates are of jobs, not of calls."""
TIMED_LOADS = TIMED_KINDS | {"jobs"}
"""Those whose files may have times."""
FILE_LOADS = frozenset({"sharegpt", "lengths", *TIMED_LOADS})

DEFAULT_NUM_REQUESTS = 1000
DEFAULT_NUM_JOBS = 100
ONLY_CLASS = "default"
"""Name of the class of objectives that come from flags: no server knows it."""
# Spread of conversation lengths: the logarithm's standard deviation of ShareGPT-like chats.
CONVERSATION_SIGMAS = 1.0, 0.7
CONVERSATION_MIN_TOKENS = 4

_data = partial(option, group="data set")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Arrivals):
    """What is asked, when, and with which objectives.

    Raises
    ------
    ConfigError : settings that do not go together, or that would have no effect.
    """

    MOST_OF_FILE: ClassVar[int | None] = None
    """Requests of a file that are taken where nobody says how many; None takes all."""
    FOR: ClassVar[dict[str, tuple[str, ...]]] = {
        "input_len": ("random", "conversation"),
        "random_range_ratio": ("random",),
        "random_output_range_ratio": ("random",),
        "length_columns": ("lengths",),
        "tokenizer": ("sharegpt", "jobs"),
        "job_deadline": tuple(sorted(JOB_LOADS)),
        "disable_shuffle": ("sharegpt", "lengths"),
    }
    """Settings that only some data sets have a use for."""
    FILES: ClassVar[frozenset[str]] = FILE_LOADS
    """Data sets that are read from a file."""

    dataset_name: LoadName | None = _data(None, help="where requests come from (default: random)")
    dataset_path: Path | None = _data(None, metavar="FILE", help="file of a data set that has one; gzip too")
    trace: Path | None = _data(
        None, metavar="FILE", help="trace file of any known kind; replayed in its own time"
    )
    length_columns: str | None = _data(
        None,
        metavar="INPUT,OUTPUT",
        help="columns of lengths (default: num_prefill_tokens,num_decode_tokens)",
    )
    tokenizer: Path | None = _data(
        None,
        metavar="PATH",
        help="model directory or .gguf file, for exact lengths of texts",
    )
    num_prompts: int | None = _data(
        None,
        metavar="N",
        help="requests (default: 1000, 100 jobs, or all of a file; to a server at most 1000)",
    )
    job_deadline: float | None = _data(
        None,
        flag="--job-deadline-ms",
        unit="ms",
        metavar="MS",
        help="time that each job has, from its start to the end of its last call (default: from its file, "
        "else by its length)",
    )
    input_len: int | None = _data(
        None,
        aliases=("--random-input-len",),
        metavar="N",
        at_least=1,
        at_most=MOST_TOKENS,
        help="mean prompt tokens of random and conversation (default: 1024)",
    )
    output_len: int | None = _data(
        None,
        aliases=("--random-output-len", "--sharegpt-output-len", "--prefix-repetition-output-len"),
        metavar="N",
        at_least=1,
        at_most=MOST_TOKENS,
        help="the same for output tokens (default: 128); replaces those of a file",
    )
    random_range_ratio: float = _data(
        0.0, metavar="X", at_least=0, below=1, help="random's lengths vary by this share around the mean"
    )
    random_output_range_ratio: float | None = _data(
        None,
        metavar="X",
        at_least=0,
        below=1,
        help="the same of output tokens alone (default: --random-range-ratio)",
    )
    disable_shuffle: bool = _data(
        default=False, is_switch=True, help="take requests of files without times in file order"
    )
    seed: int = _data(0, at_least=0, help="random seed of lengths, arrivals and classes")
    slo: SLO = part(SLO)
    slo_config: str | None = option(
        None,
        metavar="FILE.yaml",
        group=OBJECTIVES,
        help="classes by share, with name, share, weight, ttft_ms, tbt_ms, e2e_ms, trace; or a built-in "
        "class: interactive, standard, batch",
    )

    def __post_init__(self) -> None:
        check(self, type(self))
        if self.num_prompts is not None:
            check_num_requests(self.num_prompts)
        if self.trace is not None and not (self.dataset_name is None and self.dataset_path is None):
            raise ConfigError(
                "--trace names file and kind at once: leave out --dataset-name and --dataset-path"
            )
        if self.slo_config is not None and not self.slo.is_empty:
            given = ", ".join(each.flag for each in changed(self.slo))
            raise ConfigError(f"--slo-config sets the objectives itself: leave out {given}")
        if self.trace is None:  # else once its kind is known
            self._check_kind()

    @property
    def has_times(self) -> bool:
        return self.dataset_name in TIMED_LOADS

    def classes(self) -> tuple[SLOClass, ...]:
        """Return the objectives, by share of the requests.

        Raises
        ------
        ConfigError : one is outside its range, or a bad file.
        """
        if self.slo_config is None:
            if self.slo.is_empty:
                return LANE_CLASSES if self.dataset_name == LANES else ()
            return (SLOClass(name=ONLY_CLASS, slo=self.slo),)
        if self.slo_config in SLO_CLASSES:
            return (SLOClass(name=self.slo_config, slo=built_in_slo(self.slo_config)),)
        return read_slo_config(Path(self.slo_config))

    def offered(
        self,
        classes: Sequence[SLOClass] | None = None,
        *,
        max_model_len: int | None = None,
        overlong: Overlong = "error",
        count_tokens: CountTokens | None = None,
    ) -> OfferedLoad:
        """Return the requests.

        Parameters
        ----------
        classes : of objectives; None takes those of the settings.
        max_model_len : tokens of the context; None takes requests of any length.
        overlong : what becomes of longer requests.
        count_tokens : measures texts; None does so with the tokenizer of the settings.

        Raises
        ------
        ConfigError : a bad file, a file that is missing or not wanted, fewer requests than asked for in one
            that cannot be drawn from again, or settings that the data set has no use for.
        """
        load = self.named()
        classes = load.classes() if classes is None else classes
        offered = load._with_arrivals(count_tokens or _counter(load.tokenizer))
        if have_traces(classes):  # only then are the lengths known
            offered, classes = offered.with_classes(classes, seed=self.seed), ()
        if max_model_len is not None:
            offered = offered.check_lengths(max_model_len, overlong=overlong)
        return offered.with_classes(classes, seed=self.seed) if classes else offered

    def named(self) -> Self:
        """Return the same load by the name and the file of its data set; a trace's header tells its name.

        Raises
        ------
        ConfigError : a file is missing or not wanted, or a setting has no effect on the data set.
        """
        name, path = self.dataset_name or "random", self.dataset_path
        if self.trace is not None:
            path = Path(self.trace)
            name = read_trace(path, columns=self._columns).kind
        for each in changed(self):
            if name not in (names := self.FOR.get(each.name, (name,))):
                raise ConfigError(f"{each.flag} is for --dataset-name {' or '.join(names)}, not for {name}")
        if self.output_len is not None and name in {*JOB_LOADS, LANES}:
            raise ConfigError(
                f"--output-len has no effect on {name}, whose requests have lengths of their own"
            )
        if (name in self.FILES) != (path is not None):
            raise ConfigError(
                f"--dataset-name {name} needs a file: give it with --dataset-path"
                if path is None
                else f"--dataset-name {name} reads no file, but --dataset-path {path} was given"
            )
        return replace(self, dataset_name=name, dataset_path=path, trace=None)

    @property
    def _columns(self) -> tuple[str, str] | None:
        if self.length_columns is None:
            return None
        names = [name.strip() for name in self.length_columns.split(",")]
        if len(names) != 2 or not all(names):
            raise ConfigError(
                f"--length-columns takes two column names INPUT,OUTPUT, got {self.length_columns!r}"
            )
        return names[0], names[1]

    def _with_arrivals(self, count_tokens: CountTokens | None) -> OfferedLoad:
        name, rng = self.dataset_name or "random", np.random.default_rng([self.seed, 0])
        if name == LANES:
            offsets = self.offsets(self.num_prompts or DEFAULT_NUM_REQUESTS, seed=self.seed)
            if offsets is None:
                raise ConfigError("chats and queries of lanes arrive by themselves: give --request-rate")
            return lane_load(offsets, rng)
        if name in JOB_LOADS:
            jobs = self._jobs(rng, count_tokens)
            return job_load(name, jobs, self.offsets(len(jobs), seed=self.seed, times=given_starts(jobs)))
        load, times = self.requests(rng, count_tokens)
        return load.with_arrivals(self.offsets(len(load), seed=self.seed, times=times))

    def _jobs(self, rng: np.random.Generator, count_tokens: CountTokens | None) -> list[Job]:
        """Return those of a file, from its beginning, or drawn ones."""
        kind, path, deadline = self.dataset_name, self.dataset_path, self.job_deadline
        if path is None:
            return draw_jobs(kind, self.num_prompts or DEFAULT_NUM_JOBS, rng, deadline=deadline)  # type: ignore[arg-type]
        jobs = read_jobs(path, count_tokens)
        if self.num_prompts is not None and self.num_prompts > len(jobs):
            raise ConfigError(
                f"{path} has {counted(len(jobs), 'job')}, and --num-prompts is {self.num_prompts}"
            )
        if deadline is not None:
            jobs = [replace(job, deadline=deadline) for job in jobs]
        return jobs[: self.num_prompts]

    def requests(
        self, rng: np.random.Generator, count_tokens: CountTokens | None
    ) -> tuple[OfferedLoad, NDArray[np.float64] | None]:
        """Return requests that stand for themselves, without arrivals, and their recorded times if any."""
        if self.dataset_path is None:
            size = self.num_prompts or DEFAULT_NUM_REQUESTS
            prompts, outputs = (each.draw(size, rng) for each in self._lengths())
            return OfferedLoad(
                name=self.dataset_name or "random", num_prompt_tokens=prompts, num_output_tokens=outputs
            ), None
        order = None if self.disable_shuffle else rng
        if self.dataset_name != "sharegpt":
            return self._of_trace(rng)
        if count_tokens is None:
            raise ConfigError(
                "a ShareGPT file holds texts, whose lengths only a tokenizer can tell: give --tokenizer, or "
                "a CSV of lengths with --dataset-name lengths"
            )
        exchanges = read_sharegpt(self.dataset_path)
        return sharegpt_load(
            exchanges,
            num_requests=self.num_prompts or min(DEFAULT_NUM_REQUESTS, len(exchanges)),
            output_len=self.output_len,
            count_tokens=count_tokens,
            order=order,
        ), None

    def _lengths(self) -> tuple[Lengths, Lengths]:
        """Return the distributions of prompt and output tokens."""
        means = (self.input_len or 1024, self.output_len or 128)
        if self.dataset_name == "conversation":
            prompts, outputs = (
                LogNormalLength(mean=mean, sigma=sigma, low=min(CONVERSATION_MIN_TOKENS, mean), high=8 * mean)
                for mean, sigma in zip(means, CONVERSATION_SIGMAS, strict=True)
            )
            return prompts, outputs
        ratio, own = self.random_range_ratio, self.random_output_range_ratio
        return UniformLength(means[0], ratio), UniformLength(means[1], ratio if own is None else own)

    def _of_trace(self, rng: np.random.Generator) -> tuple[OfferedLoad, NDArray[np.float64] | None]:
        assert self.dataset_path is not None
        trace = read_trace(self.dataset_path, kind=self.dataset_name, columns=self._columns)  # type: ignore[arg-type]
        trace = trace.take(self._rows(trace, rng))
        outputs = trace.num_output_tokens
        if self.output_len is not None:
            outputs = np.full(len(trace), self.output_len, dtype=np.int64)
        load = OfferedLoad(
            name=trace.kind,
            # No engine takes a request without a prompt or without an output.
            num_prompt_tokens=np.maximum(1, trace.num_prompt_tokens),
            num_output_tokens=np.maximum(1, outputs),
            block_ids=trace.block_ids,
            block_size=trace.block_size,
            lines=trace.lines,
        )
        return load, trace.times

    def _rows(self, trace: Trace, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the rows to take; where a file has too few, they are drawn from it again."""
        wanted = self.num_prompts or min(len(trace), self.MOST_OF_FILE or len(trace))
        if wanted > len(trace):
            is_replay = self.timing is not None and self.timing.kind == "replay"
            if is_replay or trace.block_ids is not None:
                remedy = "their shared blocks" if trace.block_ids is not None else "their times"
                raise ConfigError(
                    f"{self.dataset_path} has {counted(len(trace), 'request')}, and --num-prompts is "
                    f"{wanted}; no request can be drawn again because of {remedy}"
                    + (
                        ""
                        if trace.block_ids is not None
                        else ": give --request-rate to draw only their lengths"
                    )
                )
            return rng.integers(len(trace), size=wanted)
        if trace.times is None and not self.disable_shuffle:
            return rng.permutation(len(trace))[:wanted]
        return np.arange(wanted)


def tightest_tbt(classes: Sequence[SLOClass]) -> float | None:
    """Return the tightest TBT objective, seconds; None without one."""
    return min((each.slo.tbt for each in classes if each.slo.tbt is not None), default=None)


def _counter(path: Path | None) -> CountTokens | None:
    if path is None:
        return None
    from onbeat.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    return lambda text: len(tokenizer.encode(text))
