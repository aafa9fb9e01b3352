"""Whether kvops can move GPU memory here, and if not, why."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

import torch

from kvops import build_info


@dataclass(frozen=True)
class Availability:
    """True or false in a condition; ``reason`` says why it is false and is empty where it is true."""

    reason: str

    def __bool__(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return "yes" if self else f"no: {self.reason}"


def cuda_available() -> Availability:
    """Whether kvops moves CUDA tensors in this process.

    Returns an object that is true or false, with the ``reason`` for a no: this build has no CUDA kernels, this PyTorch
    has no CUDA, there is no GPU, the driver is older than the CUDA version of the kernels, or the GPU is older than any
    that they were built for.

    The first three answers leave CUDA uninitialized. With a GPU in reach, its compute capability is asked for, which
    initializes CUDA: a process that means to fork should fork first.
    """
    return Availability(_reason())


def _reason() -> str:
    if not build_info.CUDA:
        return build_info.REASON
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) has no CUDA"
    if torch.cuda.device_count() == 0:  # by NVML where it is there; is_available() would initialize the driver
        return "PyTorch sees no GPU"
    driver = _driver_version()
    # Within one major version of CUDA, kernels run on older drivers too.
    if driver // 1000 < build_info.CUDA_VERSION // 1000:
        return f"the driver supports CUDA {_dotted(driver)}, expected {build_info.CUDA_VERSION // 1000}.0 or newer"
    capability = torch.cuda.get_device_capability()
    oldest = min(int(number) for number in re.findall(r"(?:sm|compute)_(\d+)", build_info.ARCHITECTURES))
    if capability[0] * 10 + capability[1] < oldest:
        found = f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}"
        return f"{found}, expected {oldest // 10}.{oldest % 10} or newer"
    return ""


def _driver_version() -> int:
    """The newest CUDA that the driver supports, 13000 for 13.0. Asking does not initialize CUDA."""
    version = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
