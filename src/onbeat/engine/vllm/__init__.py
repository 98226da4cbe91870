"""vLLM's executor as an engine: onbeat plans each step, vLLM's workers compute it.

==========  ======================================================================
`surface`   every call of vLLM that is used, and its configuration
`steps`     a planned step in vLLM's words, and what came of it in ours
`runner`    launches steps on the executor, in the order in which they are planned
==========  ======================================================================
"""
