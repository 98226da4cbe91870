"""Strings to token ids and back; chat templates; the engine sees ids only."""
