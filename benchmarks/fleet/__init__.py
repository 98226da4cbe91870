"""Several replicas, live and simulated."""
