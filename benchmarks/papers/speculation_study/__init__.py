"""The parts of the study of speculative decoding."""
