"""The record file: what a scheduler was asked and what it decided."""
