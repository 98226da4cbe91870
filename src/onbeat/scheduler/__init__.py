"""All policy: which request runs which tokens in which step. Pure: no clock, no I/O, no torch."""
