"""onbeat inside vLLM: a scheduler class and an ASGI middleware, loaded by vLLM itself.

Nothing here is imported before vLLM asks for it by name: `--scheduler-cls onbeat.vllm.SLOScheduler`,
`--middleware onbeat.vllm.SLOMiddleware`.

===========================  =====================================================================
`middleware`, `relay`        an HTTP request and its answer: objectives in; refusals and verdicts out
`requests`, `refusals`       what the routes of vLLM take, and how a refusal gets to a client
`verdicts`                   the open requests of an API server, their verdicts, and four numbers of all
`calibrate`                  where step times come from; `self_calibration` measures them
`plugin_config`, `objectives` what the server's owner set; what a request of vLLM's engine is held to
`telemetry`                  what the scheduler's process tells: predictions, refusals, step times
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
