"""Planning with deadlines: which objectives can still be kept, and which step keeps them."""
