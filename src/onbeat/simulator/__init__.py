"""Virtual replicas: the real scheduler under a virtual clock."""
