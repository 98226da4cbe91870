"""onbeat: serve large language models to a latency objective."""

__version__ = "0.1.0"
