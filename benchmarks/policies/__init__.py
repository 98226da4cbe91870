"""Published and plain rules to compare with; importing `benchmarks.policies.register` names them."""
