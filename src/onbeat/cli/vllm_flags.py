"""vLLM's flags that ask for nothing here: a command line from one of its guides starts this server too.

Each is taken with a line that says why it changes nothing. A value that would ask for something is refused,
and so are the flags of what onbeat lacks; both with the reason.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onbeat.cli.args import JSON


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag that this server can do without."""

    names: str
    """Parted by spaces."""
    why: str
    """Why it changes nothing, or what does its work."""
    nargs: int | str | None = None
    """Of argparse: 0 for a switch, None for one value, `?` for one that may be missing."""
    values: tuple[str, ...] | Callable[[str], bool] = ()
    """The values that ask for nothing; empty where all do."""
    refusal: str = ""
    """What to say of the `--no-` form of a switch; without, it is taken."""
    metavar: str | None = None
    """JSON where a configuration file may give a mapping."""

    def asks_for_nothing(self, value: str) -> bool:
        """Whether a value is one of those that change nothing."""
        if callable(self.values):
            return self.values(value)
        return not self.values or value in self.values


def _limits_nothing(text: str) -> bool:
    """Return whether limits of parts that are no text, JSON or vLLM's older `image=0`, allow none."""
    try:
        limits = json.loads(text)
    except ValueError:
        limits = dict(part.partition("=")[::2] for part in text.split(","))
    return isinstance(limits, dict) and all(limit in (0, "0") for limit in limits.values())


_SWITCH = 0
_BY_PATH = "one server answers chats, makes embeddings and scores texts; the path of a request says which"
_POLICY_CUTS = "the policy decides which prompts are cut"
_ONE_MACHINE = "an engine runs on one machine; --launcher ray puts replicas on others"
_SPEED_OF_GPUS = "it tunes vLLM's GPU kernels and graphs; the GPU engine here chooses its own"

FOREIGN_FLAGS = (
    # What is never done, or always.
    ForeignFlag("--trust-remote-code", "no code of a model is ever run", _SWITCH),
    ForeignFlag("--enable-server-load-tracking", "GET /load always tells the load", _SWITCH),
    ForeignFlag("--enable-tokenizer-info-endpoint", "/tokenizer_info is always there", _SWITCH),
    ForeignFlag("--enable-offline-docs", "/docs never loads anything from elsewhere", _SWITCH),
    ForeignFlag("--enable-auto-tool-choice", "calls are read unless --tool-call-parser is none", _SWITCH),
    ForeignFlag("--enable-reasoning", "reasoning is read unless --reasoning-parser is none", _SWITCH),
    ForeignFlag("--exclude-tools-when-tool-choice-none", "prompts then have no tools anyway", _SWITCH),
    ForeignFlag("--language-model-only", "models take text only", _SWITCH),
    ForeignFlag("--disable-log-stats", "no statistics are logged; GET /metrics has them", _SWITCH),
    ForeignFlag("--swap-space", "nothing is swapped, what is preempted runs again"),
    ForeignFlag("--max-log-len", "the log holds no prompts"),
    ForeignFlag("--uvicorn-log-level", "uvicorn only warns here; --log-level is the server's"),
    ForeignFlag("--download-dir", "hub models are kept where $HF_HUB_CACHE or $HF_HOME says"),
    ForeignFlag("--hf-token", "the hub's token is taken from $HF_TOKEN", "?"),
    ForeignFlag(
        "--enable-chunked-prefill",
        "the policy decides: slo and sarathi cut prompts into chunks",
        _SWITCH,
        refusal="the policy decides whether prompts are cut; --policy prefill-first runs them whole",
    ),
    # What could only change the speed.
    ForeignFlag("--attention-backend", "the device decides; --backend chooses the engine"),
    ForeignFlag("--compilation-config -cc", _SPEED_OF_GPUS, metavar=JSON),
    ForeignFlag("--optimization-level -O", _SPEED_OF_GPUS),
    ForeignFlag("--cudagraph-capture-sizes", _SPEED_OF_GPUS, "+"),
    ForeignFlag("--max-cudagraph-capture-size --max-seq-len-to-capture", _SPEED_OF_GPUS),
    ForeignFlag("--disable-custom-all-reduce", _SPEED_OF_GPUS, _SWITCH),
    ForeignFlag("--disable-cascade-attn", _SPEED_OF_GPUS, _SWITCH),
    ForeignFlag("--max-parallel-loading-workers", "weights are loaded by as many as it takes"),
    # What has one value here.
    ForeignFlag("--kv-cache-dtype", "KV has the type of the computation", values=("auto",)),
    ForeignFlag("--tokenizer-mode", "there is one kind of tokenizer", values=("auto", "hf")),
    ForeignFlag("--config-format", "config.json and GGUF are read", values=("auto", "hf")),
    ForeignFlag("--chat-template-content-format", "templates get texts", values=("auto", "string")),
    ForeignFlag("--response-role", "answers have the role assistant", values=("assistant",)),
    ForeignFlag("--stream-interval", "tokens are sent as they come", values=("1",)),
    ForeignFlag("--max-num-partial-prefills", _POLICY_CUTS, values=("1",)),
    ForeignFlag("--max-long-partial-prefills", _POLICY_CUTS, values=("1",)),
    ForeignFlag("--long-prefill-token-threshold", _POLICY_CUTS, values=("0",)),
    ForeignFlag("--cpu-offload-gb", "weights stay where they compute", values=("0", "0.0")),
    ForeignFlag("--api-server-count -asc", "one process answers HTTP", values=("1",)),
    ForeignFlag("--pipeline-parallel-size -pp", "a server has one pipeline stage", values=("1",)),
    ForeignFlag("--nnodes -n", _ONE_MACHINE, values=("1",)),
    ForeignFlag("--node-rank -r", _ONE_MACHINE, values=("0",)),
    ForeignFlag("--distributed-executor-backend", _ONE_MACHINE, values=("mp", "uni")),
    ForeignFlag("--task", _BY_PATH, values=("auto", "generate", "embed", "embedding", "score")),
    ForeignFlag("--runner", _BY_PATH, values=("auto", "generate", "pooling")),
    ForeignFlag("--convert", _BY_PATH, values=("auto", "none", "embed")),
    ForeignFlag("--limit-mm-per-prompt", "prompts are text only", values=_limits_nothing, metavar=JSON),
    ForeignFlag("--hf-overrides", "a model's configuration is taken as it is", values=("{}",), metavar=JSON),
)

_NO_LORA = "no LoRA adapters yet"
_NO_MEDIA = "no images, video or sound yet; prompts are text only"
_ONE_GUIDE = "one library enforces grammars, without a flag"
_NO_PLUGINS = "no code of others is loaded"
_NO_EXPERTS = "experts are not spread over devices yet"

MISSING_FLAGS: Mapping[str, str] = {
    "the server calls no tools; clients do": "--tool-server",
    _NO_LORA: "--enable-lora --lora-modules --max-loras --max-lora-rank --max-cpu-loras --lora-dtype "
    "--fully-sharded-loras --default-mm-loras --lora-extra-vocab-size --enable-lora-bias",
    _NO_MEDIA: "--mm-processor-kwargs --mm-processor-cache-gb --media-io-kwargs --allowed-local-media-path "
    "--allowed-media-domains --interleave-mm-strings --mm-encoder-tp-mode --enable-mm-embeds",
    _ONE_GUIDE: "--guided-decoding-backend --structured-outputs-config",
    "--pooling says how embeddings are made": "--pooler-config --override-pooler-config",
    _NO_EXPERTS: "--enable-expert-parallel -ep --all2all-backend --enable-eplb --num-redundant-experts",
    _NO_PLUGINS: "--middleware --logits-processors --worker-cls --worker-extension-cls --scheduler-cls "
    "--tool-parser-plugin --reasoning-parser-plugin "
    "--io-processor-plugin",
    "a model's configuration is taken as it is": "--hf-config-path --rope-scaling --rope-theta",
    "no Unix sockets yet; listen on --host 127.0.0.1": "--uds",
    "traces are of requests; --timeline writes the steps": "--collect-detailed-traces",
    "the log never holds prompts or answers": "--enable-log-outputs --enable-log-deltas",
    "no embeddings in place of prompts": "--enable-prompt-embeds",
    "an engine never sleeps; stop the server": "--enable-sleep-mode",
    "KV stays in memory; --disaggregate moves it between replicas": "--kv-transfer-config "
    "--kv-offloading-size --kv-events-config",
    _ONE_MACHINE: "--master-addr --master-port --headless --data-parallel-address "
    "--data-parallel-size-local --data-parallel-rank --data-parallel-backend",
}
"""Why onbeat lacks a flag of vLLM's, and which flags lack for that reason. Their `--no-` form is taken."""

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

_LOG_FLAGS = {
    "--enable-log-requests": True,
    "--disable-log-requests": False,
    "--disable-uvicorn-access-log": False,
}
"""vLLM's names for `--log-requests`, and what they set it to."""


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
    for why, names in MISSING_FLAGS.items():
        for name in names.split():
            parser.add_argument(name, action=_Refuse, nargs="*", const=why, help=argparse.SUPPRESS)
            if name.startswith("--"):
                parser.add_argument(
                    _off(name), action="store_const", dest="ignored", const=ignored, help=argparse.SUPPRESS
                )
    for name, values in FOREIGN_VALUES.items():
        action = parser._option_string_actions[name]
        action.type = _Renamed(name, values, action.type, ignored)
    for name, is_on in _LOG_FLAGS.items():
        for spelling, value in ((name, is_on), (_off(name), not is_on)):
            parser.add_argument(
                spelling, dest="log_requests", action="store_const", const=value, help=argparse.SUPPRESS
            )


def _add(parser: argparse.ArgumentParser, flag: ForeignFlag, ignored: list[str]) -> None:
    names = flag.names.split()
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": "ignored", "help": argparse.SUPPRESS}
    options |= {"action": _Ignore, "flag": flag, "lines": ignored}
    parser.add_argument(*names, nargs=flag.nargs, metavar=flag.metavar, **options)
    if flag.nargs == _SWITCH:
        parser.add_argument(*map(_off, names), nargs=0, **options)


def _off(name: str) -> str:
    return f"--no-{name.removeprefix('--')}"


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
        flag, name = self._flag, option_string or self.option_strings[0]
        if isinstance(values, str) and not flag.asks_for_nothing(values):
            takes = "" if callable(flag.values) else f"it takes {' or '.join(filter(None, flag.values))}, "
            raise argparse.ArgumentError(self, f"{flag.why}; {takes}not {values!r}")
        if not name.startswith("--no-"):
            self._lines.append(f"ignored: {name} ({flag.why})")
        elif flag.refusal:
            raise argparse.ArgumentError(self, flag.refusal)


class _Refuse(argparse.Action):
    """Says why there is no such flag."""

    def __call__(self, *_: object) -> None:
        raise argparse.ArgumentError(self, f"{self.const}; leave it out")


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
