"""Find model files: a path, a known model, or a hub id. No torch."""

from onbeat.hub.files import FetchStatus, ModelFiles, OnFetch
from onbeat.hub.known import DEFAULT_MODEL, KNOWN_MODELS, KnownModel
from onbeat.hub.resolve import resolve_model

__all__ = [
    "DEFAULT_MODEL",
    "KNOWN_MODELS",
    "FetchStatus",
    "KnownModel",
    "ModelFiles",
    "OnFetch",
    "resolve_model",
]
