"""The study of policies with latency objectives: cells, loads that last, runs, capacities, reports."""
