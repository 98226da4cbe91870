"""A corpus of texts that a server embeds, line by line, so that an interrupted run can go on.

============  =============================================================
`lines`       the texts of a file, checked before anything is sent
`output`      the file of embeddings, which says what is done
`sender`      requests to the server: how many at once, again after refusals
`run`         all together
============  =============================================================
"""
