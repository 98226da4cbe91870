"""Serving on an NVIDIA GPU: one generic layer for all families, its operators behind a protocol."""
