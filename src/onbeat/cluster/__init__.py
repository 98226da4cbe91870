"""A fleet live: processes that hold replicas, the wire to them, and the client that a server gets.

Decisions are made in `scheduler.cluster`; this package tells them what happens and carries them out.
"""
