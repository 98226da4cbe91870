"""The GGUF files of a repository: parts of one model, and which model a tag means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath

from onbeat.core.errors import ModelLoadError

DEFAULT_TAG = "Q4_K_M"
"""What is taken of several where no tag is given, as llama.cpp and Ollama do."""
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_PARTS = 10_000
_TAG = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))$", re.IGNORECASE)
_NO_MODELS = {"mmproj": "the vision part of the model", "imatrix": "a measurement for quantizing"}
"""In names of GGUF files that hold no language model."""


def parts_of(name: str) -> list[str]:
    """Return the names of all parts of the file that a file belongs to, in order; itself where it has none.

    Parameters
    ----------
    name : such as `model-Q8_0-00002-of-00003.gguf`, or a path that ends so.
    """
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]) < _MOST_PARTS:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def no_model(name: str) -> str | None:
    """Return what a GGUF file holds by its name, where that is no language model."""
    lower = PurePath(name).name.lower()
    return next((what for word, what in _NO_MODELS.items() if word in lower), None)


def choose_gguf(names: Iterable[str], tag: str | None, *, source: str) -> list[str]:
    """Return the files of the model that a tag means, first part first.

    Parameters
    ----------
    names : paths of all files in the repository.
    tag : the end of a file's name (`Q4_K_M`, in any case), the name of its folder, or a whole file name. None
        takes the only model there is, or `DEFAULT_TAG`.
    source : what has them, for messages.

    Raises
    ------
    ModelLoadError : no model or several fit, or parts are missing; the message lists what there is.
    """
    present = {name for name in names if name.endswith(".gguf") and no_model(name) is None}
    models = {parts[0]: parts for parts in map(parts_of, sorted(present))}
    found = _matching(models, DEFAULT_TAG if tag is None and len(models) > 1 else tag)
    if len(found) != 1:
        problem = "has no GGUF model" if not found else f"has {len(found)} GGUF models"
        wanted = "" if tag is None else f" for {tag!r}"
        raise ModelLoadError(f"{source} {problem}{wanted}; {_listed(found or models)}")
    if missing := [part for part in models[found[0]] if part not in present]:
        raise ModelLoadError(f"{source} lacks {', '.join(missing[:3])}: parts of {found[0]}")
    return models[found[0]]


def _matching(models: Mapping[str, list[str]], tag: str | None) -> list[str]:
    if tag is None:
        return list(models)
    wanted = tag.lower()
    exact = [
        name
        for name in models
        if wanted in (name.lower(), PurePath(name).name.lower(), _tag_of(name).lower())
    ]
    end = re.compile(rf"(?:.*[-._/])?{re.escape(wanted)}")
    return exact or [
        name
        for name in models
        if any(end.fullmatch(part.lower()) for part in (_stem(name), *PurePath(name).parts[:-1]))
    ]


def _stem(name: str) -> str:
    match = _PART.fullmatch(name)
    return match["stem"] if match else name.removesuffix(".gguf")


def _tag_of(name: str) -> str:
    """Return the tag that means a file: the type that its name or folder ends with, or all of the name."""
    for part in (_stem(name), *PurePath(name).parts[:-1]):
        if match := _TAG.search(part):
            return match[1]
    return name


def _listed(models: Iterable[str]) -> str:
    tags = [_tag_of(name) for name in models]
    shown = [tag if tags.count(tag) == 1 else name for tag, name in zip(tags, models, strict=True)]
    return f"choose one of :{', :'.join(sorted(shown))}" if shown else "it has none at all"
