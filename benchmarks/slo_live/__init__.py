"""Live comparison of policies on this machine; `benchmarks/slo_live.py` runs it."""
