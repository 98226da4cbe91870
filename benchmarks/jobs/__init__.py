"""The policy `slo` in simulation."""

import benchmarks.policies.register  # noqa: F401 (the study compares with them)
