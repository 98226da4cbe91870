"""The parts of the study of speculative decoding (`speculation_study.py`)."""
