"""Which model an engine gets, the configuration that its flags make, and the packages that it needs."""

from __future__ import annotations

import argparse
from pathlib import Path

from onbeat.cli.options import find_group, read_options
from onbeat.core.errors import ConfigError
from onbeat.engine.engine_config import EngineConfig
from onbeat.hub.files import ModelFiles
from onbeat.hub.known import DEFAULT_MODEL


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model."""
    group = find_group(parser, "model")
    group.add_argument(
        "model_positional",
        metavar="MODEL",
        nargs="?",
        help="Hugging Face directory, .gguf file, hub id (owner/name[:TAG]) or known model "
        f"(default: {DEFAULT_MODEL})",
    )
    group.add_argument("--model", help="the same as MODEL")
    group.add_argument("--revision", help="branch, tag or commit of a hub model")


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """How the model's text is made."""
    group = find_group(parser, "model")
    group.add_argument("--tokenizer", type=Path, help="directory or .gguf to take the tokenizer from")
    group.add_argument(
        "--chat-template",
        type=lambda text: text if "{{" in text or "{%" in text else Path(text),
        metavar="FILE",
        help="Jinja chat template, or a file with one",
    )


def model_name(args: argparse.Namespace) -> str:
    """Return the model that was asked for.

    Raises
    ------
    ConfigError : two different models were given.
    """
    if args.model and args.model_positional and args.model != args.model_positional:
        raise ConfigError(
            f"two models are given: {args.model_positional} and --model {args.model} (a --config file counts "
            "too); give one"
        )
    return str(args.model or args.model_positional or DEFAULT_MODEL)


def find_model(args: argparse.Namespace) -> ModelFiles:
    """Find or fetch the model that was asked for, with a progress bar.

    Raises
    ------
    ModelLoadError : it cannot be found.
    ConfigError : a revision is given of what has none.
    """
    from onbeat.cli.models import show_progress
    from onbeat.hub.resolve import find_stand_in, resolve_model

    with show_progress() as progress:
        if args.load_format == "stand-in":
            if args.revision is not None:
                raise ConfigError("--revision is for models of the hub; a stand-in takes none: leave it out")
            tokenizer = getattr(args, "tokenizer", None)  # not every command that loads models makes text
            return find_stand_in(model_name(args), tokenizer=tokenizer, progress=progress)
        return resolve_model(
            model_name(args),
            revision=args.revision,
            needs_weights=args.load_format != "dummy",
            progress=progress,
        )


def engine_config(args: argparse.Namespace, model: ModelFiles) -> EngineConfig:
    """Build the engine's configuration from parsed flags."""
    return read_options(args, EngineConfig, model=model, vllm_arguments=tuple(args.passed_on))
