"""Jobs: one deadline for a chain of calls."""
