"""onbeat with the policies and rules of this folder, by their names and flags: what it is compared with.

    python -m benchmarks.policies simulate --disaggregate prefill=1,decode=2 --pool-rule splitwise ...
    python -m benchmarks.policies serve MODEL --replicas 4 --router freeness --move-rule llumnix

--pool-rule, --move-rule and --autoscale-policy are flags here alone: onbeat itself has one of each.
"""

from __future__ import annotations

import sys

import benchmarks.policies.register  # noqa: F401 - adds to the tables
from onbeat.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
