"""Predicted latencies for routers that ask over HTTP: a profile in place of a model that must be trained.

===========  ======================================================================
`latency`    from the load of a model server to TTFT and TPOT, and how they learn
`pools`      which model servers there are, and what predicts their steps
`llm_d`      llm-d's protocol: predictions, measured latencies, health, metrics
===========  ======================================================================
"""
