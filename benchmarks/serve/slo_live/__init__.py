"""Live comparison of policies on this machine; `python -m benchmarks.serve.slo_live` runs it."""
