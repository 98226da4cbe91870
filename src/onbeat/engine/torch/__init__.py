"""The engine on torch: one layer for all families, by operators that are handed in."""
