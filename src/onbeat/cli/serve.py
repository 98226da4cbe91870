"""`onbeat serve`: a model behind an OpenAI-compatible API.

A command line from one of vLLM's guides starts this server too: each flag that asks for nothing here is taken
with a line that says why it changes nothing. A value that would ask for something is refused, and so are the
flags of what onbeat lacks; both with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from onbeat.cli.args import JSON, PASSED_ON, add_config_flag, checked
from onbeat.cli.engine_args import add_model_arguments, add_text_arguments, engine_config, find_model
from onbeat.cli.options import add_options, find_group, read_options
from onbeat.cluster.fleet_options import FleetOptions
from onbeat.core.errors import ConfigError
from onbeat.core.extras import require
from onbeat.core.slo import OBJECTIVES, SLO
from onbeat.engine.engine_config import EngineConfig
from onbeat.files import read_text
from onbeat.hub.files import ModelFiles
from onbeat.server.server_config import ServerConfig
from onbeat.server.slo_defaults import SLODefaults, read_classes_file
from onbeat.typed import decode

EXIT_TERMINATED = 128 + signal.SIGTERM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.set_defaults(**{PASSED_ON: []})
    add_config_flag(parser)
    add_model_arguments(parser)
    add_text_arguments(parser)
    add_options(parser, EngineConfig)
    add_options(parser, FleetOptions)
    add_server_arguments(parser)
    take_vllm_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; return the exit code."""
    import uvloop

    from onbeat.cli.outputs import check_writable
    from onbeat.cluster.client import Nursed
    from onbeat.cluster.nurse import nurse
    from onbeat.cluster.start import share_machine
    from onbeat.engine.link import set_up_logging
    from onbeat.server.listening import bind, check_tls, with_descriptors

    check_writable(args, {"--timeline": args.timeline, "--record": args.record})
    if args.otlp_traces_endpoint:
        require("opentelemetry", extra="otel", purpose="onbeat serve --otlp-traces-endpoint")
    started = time.monotonic()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    config = server_config(args)
    fleet = read_options(args, FleetOptions)
    is_split = config.front_ends > 1 or fleet.keeper_lease is not None
    if args.timeline and is_split:
        raise ConfigError("--timeline is written by one front end; leave out --front-ends and --keeper-lease")
    if fleet.keeper_lease is not None and config.fleet_key is None:
        raise ConfigError(
            f"--keeper-lease {fleet.keeper_lease} needs a --fleet-key (or ${FLEET_KEY_VARIABLE}), the same "
            "on all machines: who has it is let in"
        )
    check_tls(config)
    connections, told = with_descriptors(config.connections, fleet.fleet.most_replicas)
    config = replace(config, connections=connections)
    for line in filter(None, (*args.ignored, told)):
        console.print(line, markup=False)
    with ExitStack() as stack:
        sock = stack.enter_context(bind(config))  # a busy port is known before a model is loaded
        files = find_model(args)
        if files.name != str(files.path) and args.load_format != "stand-in":
            console.print(f"model {files.name}: {files.path}", markup=False)
        engine = replace(engine_config(args, files), slo_classes=config.slo.objectives_by_class())
        names = config.served_model_names or (files.name,)
        if taken := next((name for name, _ in engine.lora_modules if name in names), None):
            raise ConfigError(f"lora_modules has {taken!r}, which is the model's own name; choose another")
        args.nursed = Nursed()
        if is_split:
            # Keepers are forked off: what they need is imported before, so that the next one begins at once.
            from onbeat.server import shared, telemetry  # noqa: F401

            engine = share_machine(engine, fleet)
            args.nursed = nurse(args.output)
        set_up_logging(args.log_level)
        return uvloop.run(_serve(args, config, engine, fleet, sock, _Announcer(console, started)))


async def _serve(
    args: argparse.Namespace,
    config: ServerConfig,
    engine: EngineConfig,
    fleet: FleetOptions,
    sock: socket.socket,
    announcer: _Announcer,
) -> int:
    from onbeat.cli.front_ends import Front, Machine, follow, keep
    from onbeat.cluster.lease import Tenure, keeper_endpoint, open_lease
    from onbeat.cluster.start import open_fleet
    from onbeat.engine.link import build_logged
    from onbeat.metrics.timeline import open_timeline

    front = Front(
        config=config,
        model_name=public_name(config, engine.model),
        tokenizer=args.tokenizer or engine.model.path,
        chat_template=args.chat_template,
        traces_endpoint=args.otlp_traces_endpoint,
        log_level=args.log_level,
        guardian=os.getppid(),
    )
    # What is wrong with it is told before a model is loaded; a keeper has no use for it else.
    text = None if args.nursed.num_before else front.load_text()
    is_chat, text = text is not None and text[1] is not None, None if args.nursed.roster else text
    machine = Machine(front=front, sock=sock, nursed=args.nursed, on_started=announcer.follows)
    if fleet.keeper_lease is not None:
        tenure = Tenure(open_lease(fleet.keeper_lease), args.nursed.machine)
        machine = replace(machine, tenure=tenure, endpoint=keeper_endpoint(fleet.keeper_address))
        if not await _finishes_before_sigterm(tenure.begin):
            return EXIT_TERMINATED
        if not tenure.is_mine:
            await follow(machine)
            return 0
    with ExitStack() as stack:
        build = partial(build_logged, log_level=args.log_level)
        listeners = front.listeners(stack) if args.nursed.roster is None else []
        if args.timeline:
            listeners.append(stack.enter_context(open_timeline(args.timeline, is_live=True)))
        client = open_fleet(fleet, engine, build, stack, on_progress=announcer.say, nursed=args.nursed)
        if not await _finishes_before_sigterm(client.start):
            return EXIT_TERMINATED
        async with client:
            ready = partial(
                announcer.ready,
                model=(*config.served_model_names, client.info.model_name)[0],
                path=example_path(is_chat=is_chat, generates=client.info.generates),
                needs_key=bool(config.api_keys),
            )
            if args.nursed.roster is not None:
                await keep(replace(machine, on_started=ready), client)
                return 0
            telemetry = front.telemetry(client.info, listeners, fleet_counts=client.counts)
            client.add_observer(telemetry.tracker)
            await front.serve(client, telemetry, sock, text=text, on_started=ready)
    return 0


def public_name(config: ServerConfig, files: ModelFiles) -> str:
    """Return the model's name for metrics, which are open to everybody: of a path its last part alone."""
    if config.served_model_names:
        return config.served_model_names[0]
    path = Path(files.name).expanduser()
    return path.resolve().name if path.exists() else files.name


async def _finishes_before_sigterm(start: Callable[[], Awaitable[None]]) -> bool:
    """Wait for the start; a SIGTERM meanwhile gives it up (Ctrl-C raises KeyboardInterrupt by itself)."""
    from onbeat.server.listening import on_hangup, on_signals

    starting = asyncio.ensure_future(start())
    with on_signals([signal.SIGTERM], starting.cancel), on_hangup(starting.cancel, lambda: None):
        await asyncio.wait({starting})
    if starting.cancelled():
        return False
    await starting  # raises what it raised
    return True


class _Announcer:
    """Tells the person at the terminal how far the start is, and what to try once it is done."""

    def __init__(self, console: Console, started: float) -> None:
        self._console = console
        self._started = started

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def follows(self, url: str) -> None:
        seconds = time.monotonic() - self._started
        self.say(f"ready in {seconds:.1f} s: {url} (the keeper is on another machine)")

    def ready(self, url: str, *, model: str, path: str, needs_key: bool) -> None:
        seconds = time.monotonic() - self._started
        page = "" if path == "embeddings" else "a chat page; "
        self.say(f"ready in {seconds:.1f} s: {url} ({page}API docs: {url}/docs)")
        self.say("Ctrl-C stops the server. Try in another terminal:")
        self.say(example_request(url, model, path=path, needs_key=needs_key))


_EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "chat/completions": {
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 64,
    },
    "completions": {"prompt": "The sky is blue because", "max_tokens": 64},
    "embeddings": {"input": "Why is the sky blue?"},
}


def example_path(*, is_chat: bool, generates: bool) -> str:
    """Return the path below /v1 that a model answers at."""
    return ("chat/completions" if is_chat else "completions") if generates else "embeddings"


def example_request(url: str, model: str, *, path: str, needs_key: bool) -> str:
    """Return a curl command for a POSIX shell; with API keys it takes one from $ONBEAT_API_KEY."""
    body = {"model": model, **_EXAMPLES[path]}
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if needs_key else ""
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"  curl {url}/v1/{path} -H 'Content-Type: application/json'{key} \\\n    -d {data}"


API_KEY_VARIABLE = "ONBEAT_API_KEY"
FLEET_KEY_VARIABLE = "ONBEAT_FLEET_KEY"


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the objectives of requests, and how the server listens, whom it lets in, what it tells."""
    add_options(parser, SLO)
    add_options(parser, SLODefaults, only=("slo_class", "shed"))
    find_group(parser, OBJECTIVES).add_argument(
        "--slo-classes", type=Path, metavar="FILE.yaml", help="further classes, and the classes of API keys"
    )
    add_options(parser, ServerConfig)
    group = find_group(parser, "server")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"key that opens the API; repeatable (or ${API_KEY_VARIABLE}, or a line of --api-key-file)",
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with one key a line")
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least level of log lines; debug also has what the engine decided at its start",
    )
    group.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write a trace of steps and requests for ui.perfetto.dev",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        type=checked(_web_address, "an address that begins with http:// or https://"),
        help="send OpenTelemetry traces to this URL, by OTLP over HTTP, such as "
        "http://127.0.0.1:4318/v1/traces",
    )


def _web_address(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(text)
    return text


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Build the server's configuration from parsed flags, key file, classes file and environment.

    Raises
    ------
    ConfigError : an objective is out of range, a class does not exist, or a file is wrong.
    """
    key = os.environ.get(API_KEY_VARIABLE)
    file = SLODefaults() if args.slo_classes is None else read_classes_file(args.slo_classes, os.environ)
    return read_options(
        args,
        ServerConfig,
        allowed_origins=tuple(chain.from_iterable(map(_origins, args.allowed_origins))),
        fleet_key=(os.environ.get(FLEET_KEY_VARIABLE) or None) if args.fleet_key is None else args.fleet_key,
        api_keys=(*args.api_key, *_keys_in_file(args.api_key_file), *([key] if key else ())),
        slo=read_options(
            args, SLODefaults, classes=file.classes, keys=file.keys, slo=read_options(args, SLO)
        ),
    )


def _origins(text: str) -> list[str]:
    """Return the origins of one flag: one as it is, or vLLM's JSON list of them."""
    return decode(list[str], text, "allowed_origins") if text.startswith("[") else [text]


def _keys_in_file(path: Path | None) -> list[str]:
    if path is None:
        return []
    lines = read_text(path, "the API keys in").splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path} holds no API key; put one on a line")
    return keys


_Values = Mapping[str, tuple[str | None, str]]


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag that this server can do without."""

    flags: str
    """Parted by spaces."""
    why: str
    """Why it changes nothing, or what does its work."""
    takes: int | str | None = None
    """As `nargs` of argparse: 0 for a switch, None for one value, `?` for one that may be missing."""
    values: Sequence[str] = ()
    """The values that ask for nothing; empty where all do."""
    refusal: str = ""
    """What to say of the `--no-` form of a switch; without, it is taken."""
    json: bool = False
    """Whether a configuration file may give a mapping."""


@cache
def foreign_flags() -> tuple[tuple[ForeignFlag, ...], Mapping[str, str], Mapping[str, _Values]]:
    """Return what the package's table says of vLLM's flags.

    Returns
    -------
    Those that are ignored; why onbeat lacks others -> their names; flag of onbeat -> vLLM's words for
    its values, with what each stands for (None is the default) and what to say.
    """
    table = yaml.load(files("onbeat.cli").joinpath("vllm_flags.yaml").read_bytes(), yaml.CSafeLoader)
    return tuple(ForeignFlag(**entry) for entry in table["ignored"]), table["missing"], table["values"]


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
    taken, missing, renamed = foreign_flags()
    for flag in taken:
        _add(parser, flag, ignored)
    for why, names in missing.items():
        for name in names.split():
            parser.add_argument(name, action=_Refuse, nargs="*", const=why, help=argparse.SUPPRESS)
            if name.startswith("--"):
                parser.add_argument(
                    _off(name), action="store_const", dest="ignored", const=ignored, help=argparse.SUPPRESS
                )
    for name, values in renamed.items():
        action = parser._option_string_actions[name]
        action.type = _renamed(name, values, action.type, ignored)
    for name, is_on in _LOG_FLAGS.items():
        for spelling, value in ((name, is_on), (_off(name), not is_on)):
            parser.add_argument(
                spelling, dest="log_requests", action="store_const", const=value, help=argparse.SUPPRESS
            )


def _add(parser: argparse.ArgumentParser, flag: ForeignFlag, ignored: list[str]) -> None:
    names = flag.flags.split()
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": "ignored", "help": argparse.SUPPRESS}
    options |= {"action": _Ignore, "flag": flag, "lines": ignored}
    parser.add_argument(*names, nargs=flag.takes, metavar=JSON if flag.json else None, **options)
    if flag.takes == 0:
        parser.add_argument(*map(_off, names), nargs=0, **options)


def _off(name: str) -> str:
    return f"--no-{name.removeprefix('--')}"


class _Ignore(argparse.Action):
    """Writes down that a flag changes nothing."""

    def __init__(self, *args: Any, flag: ForeignFlag, lines: list[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self._flag = flag
        self._lines = lines

    def __call__(self, _parser: Any, _namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag, name = self._flag, option_string or self.option_strings[0]
        if isinstance(values, str) and values not in (flag.values or (values,)):
            takes = " or ".join(flag.values)
            raise argparse.ArgumentError(self, f"{flag.why}; it takes {takes}, not {values!r}")
        if not name.startswith("--no-"):
            self._lines.append(f"ignored: {name} ({flag.why})")
        elif flag.refusal:
            raise argparse.ArgumentError(self, flag.refusal)


class _Refuse(argparse.Action):
    """Says why there is no such flag."""

    def __call__(self, *_: object) -> None:
        raise argparse.ArgumentError(self, f"{self.const}; leave it out")


def _renamed(flag: str, values: _Values, convert: Any, lines: list[str]) -> Callable[[str], Any]:
    """Return the type of a flag that also takes vLLM's words for some of its values."""

    def read(text: str) -> Any:
        if text not in values:
            return convert(text) if callable(convert) else text
        stands_for, why = values[text]
        lines.append(f"ignored: {flag} {text} ({why})")
        return stands_for

    return read
