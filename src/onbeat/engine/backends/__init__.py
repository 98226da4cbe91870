"""What computes the steps of an engine: native, torch (plain or on a GPU), or a stand-in."""
