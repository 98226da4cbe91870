"""The command line; it wires everything."""
