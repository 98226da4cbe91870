"""Serve a fake engine until told to stop: `python -m tests.cpu.server.serve_fake CONFIG_JSON SCRIPT_JSON`."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from pathlib import Path

from onbeat.core.errors import ConfigError
from onbeat.server.listening import bind, with_descriptors
from onbeat.server.run import serve
from onbeat.server.server_config import ConnectionLimits, ServerConfig
from tests.cpu.server.fake_app import make_app
from tests.fakes_engine import FakeEngine, Script


def _announce(url: str) -> None:
    sys.stdout.write(url + "\n")
    sys.stdout.flush()


async def main() -> None:
    fields = json.loads(sys.argv[1])
    for name in ("ssl_keyfile", "ssl_certfile"):
        if name in fields:
            fields[name] = Path(fields[name])
    if num_files := fields.pop("num_files", None):
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
        fields["connections"], _ = with_descriptors(ConnectionLimits(), 1)
    config = ServerConfig(**fields)
    engine = FakeEngine(Script(**json.loads(sys.argv[2])), max_model_len=10**9)
    with bind(config) as sock:
        await serve(make_app(engine, config), config, sock, on_started=_announce)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ConfigError as error:
        sys.exit(str(error))
