"""The native CPU engine: its library, a checkpoint packed for it, and the forward pass that it runs."""
