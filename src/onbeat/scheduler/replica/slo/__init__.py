"""Planning with deadlines: what was promised, what can still be kept, and which step keeps it."""
