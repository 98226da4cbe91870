"""Grammars that constrain answers: where they come from, what is refused, and how tokens are held to them."""
