"""Decisions about many replicas."""
