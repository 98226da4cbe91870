"""Three policies under one load on one virtual H100, without torch: python examples/simulate.py [DEVICE]."""

from __future__ import annotations

import sys

import numpy as np

import onbeat
from onbeat.metrics.attainment import good_requests

PROMISE = onbeat.SLO(ttft=0.5, tbt=0.025)


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "h100-sxm"
    load = onbeat.Load(
        dataset_name="conversation", input_len=1024, output_len=256, request_rate=18.0, num_prompts=1000
    )
    for policy in ("prefill-first", "sarathi", "slo"):
        result = onbeat.simulate(
            model="meta-llama/Llama-3.1-8B",
            device=device,
            load=load,
            slo=PROMISE,
            policy=policy,
            max_model_len=16384,
        )
        first = np.array([record.ttft for record in result.records]) * 1e3
        gaps = np.concatenate([np.diff(record.delivery_times) for record in result.records]) * 1e3
        print(
            f"{policy:14} kept {good_requests(result.records).mean():6.1%}   "
            f"TTFT P50 {np.median(first):6.1f} ms, P99 {np.percentile(first, 99):7.1f} ms   "
            f"TBT P99 {np.percentile(gaps, 99):6.1f} ms, longest {gaps.max():7.1f} ms"
        )


if __name__ == "__main__":
    main()
