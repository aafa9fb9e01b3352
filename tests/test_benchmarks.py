"""The benchmarks run, in their quick modes, and the README says what their committed results say."""

import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


def output_of(script, *arguments):
    run = subprocess.run([sys.executable, BENCHMARKS / script, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("script", ["cpu.py", "hicache.py"])
def test_quick_mode(script):
    assert output_of(script, "--quick")


def test_readme_is_what_the_results_say():
    output_of("report.py", "--check")
