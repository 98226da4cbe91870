"""The OpenAI-compatible HTTP server; it knows the engine only as `core.EngineClient`."""
