"""Building blocks that the model families share. Plain callables over tensors."""
