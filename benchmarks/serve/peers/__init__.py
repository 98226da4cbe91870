"""onbeat beside other servers on one machine, in interleaved rounds."""
