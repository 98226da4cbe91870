"""Answers how much load a configuration can take."""
