"""Named tuples made by the hundred."""

from __future__ import annotations

new_tuple = tuple.__new__
"""Makes one without the call of its own constructor: `new_tuple(Job, (deadline, seconds, state))`."""
