"""Two kinds of prompts in one load: a few long ones among short ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.workload.prompts import FreshPrompts, PromptWriter
from onbeat.workload.workload import Workload

SHORT, LONG = "short", "long"


def every_nth(num_requests: int, share: float) -> NDArray[np.bool_]:
    """Return a flag a request: of any first k requests, floor(k * share) have it.

    Evenly spread rather than drawn, so that a short run has the share it was asked for, and two runs meet
    the long prompts at the same places.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"a share of the requests must lie in [0, 1], got {share:g}")
    # A share such as 0.1 is a little below a tenth in binary: without the nudge the tenth would be missed.
    so_far = np.floor(np.arange(num_requests + 1) * share + 1e-9)
    return np.asarray(np.diff(so_far) > 0)


def mix_in_long_prompts(
    workload: Workload, *, share: float, num_tokens: int, writer: PromptWriter
) -> Workload:
    """Return the workload with every n-th prompt replaced by a long one, and all of them in two groups.

    Parameters
    ----------
    share : of the requests that become long.
    num_tokens : length of each long prompt.
    """
    is_long = every_nth(len(workload), share)
    lengths = np.where(is_long, num_tokens, workload.num_prompt_tokens)
    return replace(
        workload,
        prompts=FreshPrompts(writer=writer, num_tokens=lengths.tolist()),
        num_prompt_tokens=lengths,
        groups=tuple(LONG if flag else SHORT for flag in is_long.tolist()),
    )
