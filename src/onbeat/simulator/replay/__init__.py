"""What a recorded run decided, decided again; and how well simulations tell its latencies."""
