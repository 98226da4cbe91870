"""Tensor parallelism: one model's weights split among processes that run every step together."""
