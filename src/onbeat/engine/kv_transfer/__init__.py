"""Copies KV blocks from one engine's memory into another's."""
