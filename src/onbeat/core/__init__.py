"""Words and contracts that every other package speaks; standard library only."""
