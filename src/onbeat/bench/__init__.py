"""Load any OpenAI-compatible endpoint and report its latency."""
