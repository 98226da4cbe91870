"""vLLM's executor as an engine: onbeat plans each step, vLLM's workers compute it.

===========  ======================================================================
`surface`    every call of vLLM that is used, its configuration, and what requests ask of it
`runner`     a planned step in vLLM's words, launched in order, and what came of it in ours
`faults`     what its workers may do wrong
===========  ======================================================================
"""
