"""Speculative decoding in the engine: what proposes drafts, and how they are verified."""
