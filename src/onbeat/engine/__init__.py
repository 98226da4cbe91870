"""One replica on real hardware (torch): token ids in, token ids out."""
