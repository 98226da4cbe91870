"""Tables, charts and pages of runs, measured or simulated."""
