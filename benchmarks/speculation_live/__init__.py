"""Speculation live: off, adaptive and fixed draft lengths in turns: `benchmarks/speculation_live.py`."""
