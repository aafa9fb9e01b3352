"""Runs the tests and writes what came of them as data, with the machine they ran on.

python benchmarks/suite.py NAME [PYTEST ARGUMENTS]     # writes benchmarks/results/NAME.json
"""

from __future__ import annotations

import collections
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml

from measure import name_and_arguments, save

ROOT = pathlib.Path(__file__).parents[1]


def main() -> int:
    name, arguments = name_and_arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "junit.xml")
        # Not `-m pytest`: that would put the source folder first and test it in place of what was installed.
        run = "import sys, pytest; sys.path[:] = filter(None, sys.path); sys.exit(pytest.main(sys.argv[1:]))"
        command = [sys.executable, "-c", run, f"--junitxml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if not report.exists():
            return code
        suite = xml.parse(report).getroot().find("testsuite")
    cases = suite.findall("testcase")
    skipped = collections.Counter(
        case.find("skipped").get("message") for case in cases if case.find("skipped") is not None
    )
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if case.find("failure") is not None]
    failed += [f"{case.get('classname')}::{case.get('name')}" for case in cases if case.find("error") is not None]
    files = collections.Counter(case.get("classname").split(".")[-1] for case in cases)
    record = {
        "arguments": arguments,
        "passed": len(cases) - len(failed) - sum(skipped.values()),
        "failed": failed,
        "skipped": dict(skipped),
        "cases by file": dict(sorted(files.items())),
        "seconds": round(float(suite.get("time")), 1),
    }
    print(save(name, {"tests": record}))
    return code


if __name__ == "__main__":
    sys.exit(main())
