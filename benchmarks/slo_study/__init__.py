"""The parts of the study of policies that plan with deadlines (`slo_study.py`)."""
