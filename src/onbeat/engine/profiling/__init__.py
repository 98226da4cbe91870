"""Measures the step times of an engine on this machine: `onbeat profile`, and `serve`'s calibration."""
