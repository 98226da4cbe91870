"""onbeat inside vLLM: a scheduler class and an ASGI middleware, loaded by vLLM itself.

Nothing here is imported before vLLM asks for it by name: `--scheduler-cls onbeat.vllm.SLOScheduler`,
`--middleware onbeat.vllm.SLOMiddleware`.

===========================  =====================================================================
`surface`                    vLLM's scheduler and its KV by their internals; no other module knows them
`scheduler`                  the class that vLLM loads; its plans, and what is done where there is none
`steps`                      steps planned by our planner, held to by vLLM, and followed
`calibrate`                  where step times come from, and how they are measured
`middleware`, `relay`        an HTTP request and its answer: objectives in; refusals and verdicts out
`verdicts`                   the open requests of an API server, their verdicts, and four numbers of all
`telemetry`                  how the scheduler's process tells of refusals, predictions and step times
`objectives`                 what the server's owner set; what a request is held to
===========================  =====================================================================
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "SLOScheduler": "onbeat.vllm.scheduler",
    "SLOSchedulerMixin": "onbeat.vllm.scheduler",
    "SLOMiddleware": "onbeat.vllm.middleware",
}
"""Names that users write down, and where they are."""


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
