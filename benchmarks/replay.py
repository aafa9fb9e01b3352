"""Replays a trace and writes the result with the machine it ran on.

python benchmarks/replay.py NAME [TRACE.jsonl] [OPTIONS OF `python -m kvops replay`]   # benchmarks/results/NAME.json
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

from measure import name_and_arguments, save

from kvops.__main__ import main as kvops_command


def main() -> int:
    name, arguments = name_and_arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "replay.json")
        code = kvops_command(["replay", *arguments, "--json", str(result)])
        if code == 2:
            return code
        replay = json.loads(result.read_text())
    trace = replay["setting"]["trace"]
    replay["setting"]["trace"] = trace and pathlib.Path(trace).name
    print(save(name, {"replay": replay}))
    return code


if __name__ == "__main__":
    sys.exit(main())
