"""An engine without a model: it takes the time that a device would, and its KV cache decides what it says."""
