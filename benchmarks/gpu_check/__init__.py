"""The stages of scripts/gpu-check: each module is one process."""
