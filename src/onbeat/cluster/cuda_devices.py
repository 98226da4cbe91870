"""The CUDA devices of this machine, and which replica gets which."""

from __future__ import annotations

import ctypes
import os

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.device_spec import is_gpu


def visible_devices() -> list[str]:
    """Return the CUDA devices that this process may use, named as in `CUDA_VISIBLE_DEVICES`.

    The driver is asked for their number, so that no device is opened here.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(_num_devices())]
    devices = []
    for device in named.split(","):
        if device.strip() in ("", "-1"):  # CUDA sees none from the first on that is not there
            break
        devices.append(device.strip())
    return devices


def share_devices(device: str, num_replicas: int) -> list[str]:
    """Share the CUDA devices of this machine out among replicas.

    Parameters
    ----------
    device : as in the engine's configuration; with `auto` replicas run on CUDA where there is any device.

    Returns
    -------
    devices : one a replica, and those of replicas that are added later; none where all run on the CPU, or on
        one device that was named.

    Raises
    ------
    ConfigError : there are fewer devices than the replicas need.
    """
    if device not in ("auto", "cuda") and not is_gpu(device):
        return []
    devices = visible_devices()
    if not devices:
        return []
    if len(devices) < num_replicas:
        raise ConfigError(
            f"{num_replicas} replicas need {num_replicas} CUDA devices, but there are {len(devices)}; give "
            f"--replicas {len(devices)}, --device cuda:0 to share that one, or --device cpu"
        )
    return devices


def _num_devices() -> int:
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if driver.nvmlInit_v2() or driver.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    driver.nvmlShutdown()
    return count.value
