"""Live servers on this machine, beside one another."""
