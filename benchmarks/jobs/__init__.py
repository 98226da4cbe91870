"""Jobs: calls with one deadline together, in simulation."""
