"""Scheduling inside one replica."""
