"""The package as installed: its files, what its library needs and shows, what an import leaves alone."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvops
from kvops import build_info

ROOT = Path(__file__).parents[1]
LIBRARY = Path(build_info.__file__).with_name("_kvops.so")
DISTRIBUTION = importlib.metadata.distribution("kvops")

needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) is not installed")


def output_of(*command, cwd=None):
    run = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    return run.stdout


def dynamic_entries(tag):
    return re.findall(rf"\({tag}\).*\[(.*)\]", output_of("readelf", "--dynamic", LIBRARY))


def dynamic_symbols():
    """(binding, defined, name) of each symbol that the library asks of others or shows to them."""
    rows = [line.split() for line in output_of("readelf", "--dyn-syms", "--wide", LIBRARY).splitlines()]
    return [(row[4], row[6] != "UND", row[7]) for row in rows if len(row) >= 8 and row[0].rstrip(":").isdigit()]


def test_every_file_is_installed():
    installed = {path.as_posix() for path in DISTRIBUTION.files if path.suffix != ".pyc" and path.parts[0] == "kvops"}
    expected = {"kvops/_kvops.so", "kvops/build_info.py"}
    for folder, package in (("kvops", "kvops"), ("meta", "kvops/meta")):
        files = [path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file()]
        expected |= {f"{package}/{path.as_posix()}" for path in files if path.suffix not in (".pyc", ".in")}
    assert installed == expected


def test_every_source_is_compiled():
    listed = re.findall(r"csrc/\S+\.(?:cpp|cu)\b", (ROOT / "CMakeLists.txt").read_text())
    present = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".cu")]
    assert sorted(listed) == sorted(path.relative_to(ROOT).as_posix() for path in present)


def test_wheel_is_for_every_python():
    wheel = DISTRIBUTION.read_text("WHEEL")
    assert re.findall(r"^Tag: (\S+)-\S+$", wheel, re.M) == ["py3-none"]
    assert "Root-Is-Purelib: false" in wheel


def test_version_is_one():
    assert kvops.__version__ == build_info.VERSION == DISTRIBUTION.version


@needs_readelf
def test_library_names_pytorch_and_no_cuda():
    needed = set(dynamic_entries("NEEDED"))
    pytorch = {"libtorch.so", "libtorch_cpu.so", "libc10.so"}
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    system |= {"libdl.so.2", "librt.so.1", "libpthread.so.0"}  # parts of libc before glibc 2.34
    assert pytorch <= needed <= pytorch | system
    assert dynamic_entries("RUNPATH") == ["$ORIGIN/../torch/lib"]


@needs_readelf
def test_library_asks_pytorch_for_its_stable_abi_only():
    undefined = {name: binding for binding, defined, name in dynamic_symbols() if not defined}
    # Versioned names belong to libc and its kin; PyTorch's have no version. The stable ABI is plain C.
    unversioned = {name for name in undefined if "@" not in name}
    stable = {name for name in unversioned if name.startswith(("aoti_torch_", "torch_"))}
    standard_library = {name for name in unversioned if re.match(r"_ZN?[KRO]*S[ast]", name)}
    assert "aoti_torch_library_impl" in stable or "torch_library_impl" in stable
    assert {name for name in unversioned - stable - standard_library if undefined[name] != "WEAK"} == set()

    # Only a CUDA build of PyTorch has this one; the library must load without it.
    assert undefined.get("aoti_torch_get_current_cuda_stream", "WEAK") == "WEAK"
    if build_info.CUDA:
        assert "aoti_torch_get_current_cuda_stream" in undefined


@needs_readelf
def test_library_keeps_its_cuda_runtime_to_itself():
    shown = [name for binding, defined, name in dynamic_symbols() if defined and binding == "GLOBAL"]
    ours = sorted(name for name in shown if re.match(r"_*cu[A-Z]|_*cuda|\w*kvops", name))
    assert ours == ["kvops_at_exit", "kvops_tune"]


@pytest.mark.skipif(not build_info.CUDA, reason=build_info.REASON)
@pytest.mark.skipif(shutil.which("cuobjdump") is None, reason="cuobjdump is not installed")
def test_library_holds_code_for_the_architectures_it_names():
    code = re.findall(r"\.(sm_\w+)\.cubin", output_of("cuobjdump", "--list-elf", LIBRARY))
    ptx = re.findall(r"\.sm_(\w+)\.ptx", output_of("cuobjdump", "--list-ptx", LIBRARY))
    assert set(code) | {f"compute_{number}" for number in ptx} == set(build_info.ARCHITECTURES.split())


def test_reason_is_that_of_the_build():
    available = kvops.cuda_available()
    assert bool(available) == (available.reason == "")
    if build_info.CUDA:
        assert build_info.REASON == ""
        assert build_info.CUDA_VERSION >= 12000
        assert build_info.ARCHITECTURES
        assert torch.cuda.is_available() or not available
    else:
        assert build_info.REASON
        assert build_info.REASON in available.reason
        assert (build_info.CUDA_VERSION, build_info.ARCHITECTURES) == (0, "")


def test_import_leaves_cuda_alone(tmp_path):
    program = """
import torch

def drivers():
    return {line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line}

before = drivers()
import kvops
assert drivers() == before
assert not torch.cuda.is_initialized()
assert torch.ops.kvops.move_kv.default
"""
    output_of(sys.executable, "-c", program, cwd=tmp_path)


def test_a_forked_child_transfers(tmp_path):
    program = """
import os
import torch
import kvops

def transfers():
    src = torch.arange(12.0).reshape(4, 3)
    dst = torch.zeros(4, 3, device="cuda" if kvops.cuda_available() else "cpu")
    kvops.transfer_kv_per_layer_mla(src.pin_memory() if dst.is_cuda else src, dst)
    return torch.equal(dst.cpu(), src)

child = os.fork()
if child == 0:
    os._exit(0 if transfers() else 1)
assert os.waitpid(child, 0)[1] == 0
assert transfers()
"""
    output_of(sys.executable, "-c", program, cwd=tmp_path)
