"""File descriptors of a server: as many as its connections need, or words where it may have fewer."""

from __future__ import annotations

import resource
from dataclasses import replace

from onbeat.core.errors import ConfigError, counted
from onbeat.server.server_config import ConnectionLimits

OWN_FILES = 96
"""Of a server without connections: some 50, those that it has for a moment, and a burst that it refuses."""
REPLICA_FILES = 8
"""Of the server, for each replica."""
_HINT = "raise the limit (`ulimit -n`, or LimitNOFILE= in a systemd unit)"


def with_descriptors(limits: ConnectionLimits, num_replicas: int) -> tuple[ConnectionLimits, str]:
    """Let this process open as many files as it may need.

    Parameters
    ----------
    limits : what the server's connections may be.
    num_replicas : most that there will be.

    Returns
    -------
    limits : with as many connections as there are files for: above them clients hear 503, not nothing.
    told : the line that says so; empty where all fit.

    Raises
    ------
    ConfigError : there are too few for a server.
    """
    own = OWN_FILES + REPLICA_FILES * num_replicas
    needed = own + limits.max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft <= own:
        raise ConfigError(
            f"this process may open {soft} files, and a server with {counted(num_replicas, 'replica')} needs "
            f"{own + 1} or more; {_HINT}"
        )
    if soft >= needed:
        return limits, ""
    fitting = replace(limits, max_connections=soft - own)
    return fitting, (
        f"connections: at most {fitting.max_connections:,} at once, because this process may open {soft:,} "
        f"files; --max-connections {limits.max_connections} needs {needed:,}: {_HINT}"
    )
