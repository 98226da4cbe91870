"""The version of the package, apart: whoever writes it down loads nothing else."""

__version__ = "0.2.0"
