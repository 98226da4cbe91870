"""Speculative decoding as the scheduler sees it: how many draft tokens are worth their time."""
