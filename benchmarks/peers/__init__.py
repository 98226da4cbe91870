"""onbeat beside other servers on one machine, in interleaved rounds; `benchmarks/peers.py` runs it."""
