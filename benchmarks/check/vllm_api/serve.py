"""Start `onbeat serve` as vLLM's tests start `vllm serve`: another model under the test's name.

Flags that onbeat does not take are left out, one by one; the tests of what they turn on fail then.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from onbeat.cli.main import build_parser
from onbeat.cli.serve import API_KEY_VARIABLE
from onbeat.core.errors import OnbeatError
from onbeat.hub.known import DEFAULT_MODEL

CHAT_MODEL = "VLLM_API_CHAT_MODEL"
"""The variable of the environment that names the model for tests of larger chat models."""

_KNOWN = (
    (("opt-125m", "gpt2"), "gemma3-270m"),
    (("smollm", "tiny-random", "small"), DEFAULT_MODEL),
)
"""Parts of names -> the nearest known model: a base model for base models, a small one for small ones."""


def stand_in(model: str) -> str:
    """Return the model that is served in place of one that a test asks for."""
    known = (name for parts, name in _KNOWN if any(part in model.lower() for part in parts))
    return next(known, os.environ.get(CHAT_MODEL) or DEFAULT_MODEL)


def accepted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments that `onbeat serve` takes, and the flags that it does not."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("-") or not groups:
            groups.append([])
        groups[-1].append(argument)
    kept: list[str] = []
    dropped: list[str] = []
    for group in groups:
        if group[0] != "--tokenizer" and is_accepted(group):  # that of another model
            kept += group
        else:
            dropped.append(group[0])
    return kept, dropped


def is_accepted(group: Sequence[str]) -> bool:
    """Return whether `onbeat serve` takes one flag with its values."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            build_parser().parse_args(["serve", DEFAULT_MODEL, *group])
        except (SystemExit, OnbeatError):
            return False
    return True


def main() -> None:
    """Become the server."""
    arguments = sys.argv[1:]
    place = 0
    if "--model" in arguments:
        place = arguments.index("--model")
        del arguments[place]
    model = arguments.pop(place)
    kept, dropped = accepted(arguments)
    if dropped:
        print("left out:", *dropped, file=sys.stderr)
    names = [] if "--served-model-name" in kept else ["--served-model-name", model]
    if key := os.environ.get("VLLM_API_KEY"):  # which `vllm serve` reads
        os.environ.setdefault(API_KEY_VARIABLE, key)
    own = ("-m", "onbeat", "serve", stand_in(model), "--metrics-aliases", "vllm")
    os.execv(sys.executable, [sys.executable, *own, *names, *kept])


if __name__ == "__main__":
    main()
