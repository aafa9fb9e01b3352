"""The parts of the core that need no PyTorch, tested in C++ (tests/cpp), under sanitizers where there are any."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SOURCES = {
    "test_copy_rows": ["coalesce.cpp", "cpu/copy_bytes.cpp", "cpu/copy_rows.cpp"],
    "test_overlap": ["overlap.cpp"],
}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def run(*command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def sanitize(tmp_path_factory):
    """The sanitizers' options, or none where programs built with them do not link or do not start."""
    program = tmp_path_factory.mktemp("sanitize") / "empty"
    source = program.with_suffix(".cpp")
    source.write_text("int main() {}\n")
    works = run("g++", *SANITIZE, source, "-o", program).returncode == 0 and run(program).returncode == 0
    return SANITIZE if works else []


def test_every_cpp_test_is_listed():
    assert sorted(SOURCES) == sorted(path.stem for path in (ROOT / "tests" / "cpp").glob("test_*.cpp"))


@pytest.mark.parametrize("name", SOURCES)
def test_cpp(name, sanitize, tmp_path):
    sources = [ROOT / "tests" / "cpp" / f"{name}.cpp", *(CSRC / source for source in SOURCES[name])]
    options = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{CSRC}", *sanitize]
    build = run("g++", *options, *sources, "-o", tmp_path / name)
    assert build.returncode == 0, build.stderr
    test = run(tmp_path / name)
    assert test.returncode == 0, f"{test.stdout}\n{test.stderr}"
    assert test.stdout.startswith(f"{name}: ok")
