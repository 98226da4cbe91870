"""The model in torch operators: one layer for all families, and the reference of the other engines."""
