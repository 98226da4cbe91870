"""Weights under their Hugging Face parameter names, from safetensors, GGUF, or a random generator."""
