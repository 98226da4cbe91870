"""What papers publish, repeated."""
