"""Find model files: a path, a known model, or a hub id. No torch."""
