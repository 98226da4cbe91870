"""vLLM's own tests of its HTTP API, run against onbeat."""
