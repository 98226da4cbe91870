"""Who asks for what, when: arrivals, lengths, traces."""
