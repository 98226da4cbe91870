"""Latency percentiles, timelines and the definitions behind them, for live and recorded runs."""
