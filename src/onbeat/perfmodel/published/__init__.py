"""Step-time models in formats that papers published: read, never fitted here."""
