"""vLLM's executor as an engine: onbeat plans each step, vLLM's workers compute it.

===========  ======================================================================
`arguments`  what users and requests ask of vLLM, in its words
`surface`    every other call of vLLM that is used, and its configuration
`runner`     a planned step in vLLM's words, launched in order, and what came of it in ours
`outputs`    tokens and log-probabilities
===========  ======================================================================
"""
