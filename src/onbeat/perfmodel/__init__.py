"""Predicts the time of a step from the sums of its batch."""
