"""Tensor parallelism: one model's weights split among processes that run every step together.

On a CPU it is a test rig: a split model runs and is tested without GPUs. It brings no speed, since the
processes share the cores and the memory bandwidth of one machine.
"""
