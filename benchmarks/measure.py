"""How every benchmark here measures: warm-up, a flushed L2, medians, and the machine written beside the numbers."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import kvops

RESULTS = pathlib.Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What a number must be read with."""
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": os.environ.get("KVOPS_COMMIT") or _git("rev-parse", "--short=12", "HEAD"),
        "kvops": kvops.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "driver": _driver(), "cuda": torch.version.cuda}
    return facts


def save(name: str, record: dict[str, Any]) -> pathlib.Path:
    """Writes a result where the report finds it; OUT names another folder."""
    folder = pathlib.Path(os.environ.get("OUT", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **record}, indent=1) + "\n")
    return path


def name_and_arguments(usage: str) -> tuple[str, list[str]]:
    """The command line of a script that passes all but the name of its result on."""
    if len(sys.argv) < 2:
        sys.exit(usage)
    return sys.argv[1], sys.argv[2:]


class GpuTimer:
    """Milliseconds of GPU time from events, the L2 flushed before each run."""

    def __init__(self) -> None:
        size = torch.cuda.get_device_properties(0).L2_cache_size
        self._flush = torch.empty(4 * size, dtype=torch.uint8, device="cuda")

    def median_ms(self, run: Callable[[], object], repeat: int = 20, seconds: float = 0.5) -> float:
        """At most `repeat` runs; fewer, but at least three, of one that takes long."""
        for _ in range(2):
            run()
        times: list[float] = []
        while len(times) < repeat and (len(times) < 3 or sum(times) < 1e3 * seconds):
            self._flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)


def interleaved_seconds(runs: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Median wall time of several CPU contenders, taken in turn, so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(repeat + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if round_number > 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip().splitlines()[0] if result.returncode == 0 else "unknown"
