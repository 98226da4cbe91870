"""vLLM's flags that ask for nothing here: a command line from one of its guides starts this server too.

Each is taken with a line that says why it changes nothing. A value that would ask for something is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlag:
    """A flag that this server can do without."""

    names: tuple[str, ...]
    why: str
    """Why it changes nothing, or what does its work."""
    nargs: int | str | None = 0
    """Of argparse: 0 for a switch, None for one value, `?` for one that may be missing."""
    values: tuple[str, ...] = ()
    """The values that ask for nothing; empty where all do."""
    refusal: str = ""
    """What to say of the others; of a switch, of its `--no-` form, which else is taken."""


FOREIGN_FLAGS = (
    ForeignFlag(names=("--enforce-eager",), why="no CUDA graphs here"),
    ForeignFlag(names=("--trust-remote-code",), why="no code of a model is ever run"),
    ForeignFlag(names=("--enable-prompt-tokens-details",), why="usage always has them"),
    ForeignFlag(
        names=("--enable-chunked-prefill",),
        why="the policy decides: slo and sarathi cut prompts into chunks",
        refusal="the policy decides whether prompts are cut; --policy prefill-first runs them whole",
    ),
    ForeignFlag(
        names=("--gpu-memory-utilization",),
        nargs=None,
        why="the KV cache has --kv-cache-memory-bytes, else a quarter of the free memory, at most 4G",
    ),
    ForeignFlag(names=("--swap-space",), nargs=None, why="nothing is swapped, what is preempted runs again"),
    ForeignFlag(
        names=("--generation-config",),
        nargs=None,
        values=("vllm",),
        why="no sampling defaults are read from a model",
        refusal="no sampling defaults are read from a model; requests state their own, so leave it out",
    ),
    ForeignFlag(
        names=("--uvicorn-log-level",), nargs=None, why="uvicorn only warns here; --log-level is the server's"
    ),
    ForeignFlag(
        names=("--task", "--runner"),
        nargs=None,
        values=("auto", "generate"),
        why="there is no other",
        refusal="this server only generates text",
    ),
    ForeignFlag(
        names=("--download-dir",), nargs=None, why="hub models are kept where $HF_HUB_CACHE or $HF_HOME says"
    ),
    ForeignFlag(names=("--hf-token",), nargs="?", why="the hub's token is taken from $HF_TOKEN"),
    ForeignFlag(
        names=("--pipeline-parallel-size", "-pp"),
        nargs=None,
        values=("1",),
        why="there is one stage",
        refusal="a server has one pipeline stage",
    ),
)

FOREIGN_VALUES: Mapping[str, Mapping[str, tuple[str | None, str]]] = {
    "--dtype": {
        "half": ("auto", "float16 is not computed here; auto takes bfloat16 or float32"),
        "float16": ("auto", "float16 is not computed here; auto takes bfloat16 or float32"),
        "float": ("float32", "that is float32"),
    },
    "--load-format": {
        "safetensors": ("auto", "auto sees what the model is"),
        "hf": ("auto", "auto sees what the model is"),
        "gguf": ("auto", "auto sees what the model is"),
    },
    "--max-model-len": {
        "auto": (None, "that is the default"),
        "-1": (None, "that is the default"),
    },
}
"""vLLM's values of flags that onbeat has: what each stands for, None for the default, and what to say."""


def take_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Let a command take them. Call it when all of its own flags are declared.

    Parameters
    ----------
    parser : of the command; `ignored` of what it parses is the list of lines to print, one a flag.
    """
    ignored: list[str] = []
    parser.set_defaults(ignored=ignored)
    for flag in FOREIGN_FLAGS:
        _add(parser, flag, ignored)
    for name, values in FOREIGN_VALUES.items():
        action = parser._option_string_actions[name]
        action.type = _Renamed(name, values, action.type, ignored)
    for name, is_on in (("--enable-log-requests", True), ("--disable-log-requests", False)):
        other = f"--no-{name.removeprefix('--')}"
        for spelling, value in ((name, is_on), (other, not is_on)):
            parser.add_argument(
                spelling, dest="log_requests", action="store_const", const=value, help=argparse.SUPPRESS
            )


def _add(parser: argparse.ArgumentParser, flag: ForeignFlag, ignored: list[str]) -> None:
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": "ignored", "help": argparse.SUPPRESS}
    parser.add_argument(*flag.names, action=_Ignore, nargs=flag.nargs, flag=flag, lines=ignored, **options)
    if flag.nargs == 0:
        off = f"--no-{flag.names[0].removeprefix('--')}"
        parser.add_argument(off, action=_Ignore, nargs=0, flag=flag, lines=ignored, **options)


class _Ignore(argparse.Action):
    """Writes down that a flag changes nothing."""

    def __init__(self, *args: Any, flag: ForeignFlag, lines: list[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self._flag = flag
        self._lines = lines

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        _namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = self._flag
        name = option_string or flag.names[0]
        is_other_value = bool(flag.values) and values not in flag.values
        if flag.refusal and (is_other_value or name.startswith("--no-")):
            raise argparse.ArgumentError(self, f"{flag.refusal}" + (f", not {values!r}" if values else ""))
        if not name.startswith("--no-"):
            self._lines.append(f"ignored: {name} ({flag.why})")


class _Renamed:
    """The type of a flag that also takes vLLM's words for some of its values."""

    def __init__(
        self,
        flag: str,
        values: Mapping[str, tuple[str | None, str]],
        convert: Callable[[str], Any] | argparse.FileType | str | None,
        lines: list[str],
    ) -> None:
        self._flag = flag
        self._values = values
        self._convert = convert
        self._lines = lines

    def __call__(self, text: str) -> Any:
        if text in self._values:
            stands_for, why = self._values[text]
            self._lines.append(f"ignored: {self._flag} {text} ({why})")
            return stands_for
        return self._convert(text) if callable(self._convert) else text
