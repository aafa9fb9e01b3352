"""What the engines meet on a GPU beside streams: indices in any memory, bounded SMs, large transfers, other devices.

That the right bytes move is for test_transfer.py, which runs every engine between every two memories.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cases import Way, caches_for, dense, latent_stack, pick
from cuda_cases import cuda_test, every_pinned_way, every_pool, every_sm_way, every_way, needs_two_gpus, simple_call
from reference import check

pytestmark = cuda_test


@pytest.mark.parametrize("dst_memory", ["cpu", "pinned", "cuda:0"])
@pytest.mark.parametrize("src_memory", ["cpu", "pinned", "cuda:0"])
@every_way
def test_indices_anywhere(way, src_memory, dst_memory):
    src = replace(way, index=src_memory).indices(pick(11, 20, seed=1))
    dst = replace(way, index=dst_memory).indices(pick(11, 21, seed=2), dtype=torch.int32, form="every_other")
    check(way.call("transfer_kv_all_layer", caches_for("transfer_kv_all_layer", way), src, dst))


@pytest.mark.parametrize("num_sms", [1, 2, 3, 10_000])
@every_sm_way
def test_num_sms(way, num_sms):
    src, dst = dense((1100, 132), memory=way.src), dense((1100, 132), memory=way.dst)
    indices = pick(1000, 1100, seed=1), pick(1000, 1100, seed=2)
    check(way.call("transfer_kv_per_layer_mla", (src, dst), *indices, num_sms=num_sms))


@pytest.mark.parametrize("num_sms", [1, 3])
@every_pool
def test_num_sms_of_moves(way, num_sms):
    pool = dense((1100, 132), memory=way.src)
    cycle = pick(1000, 1100)
    check(way.call("move_kv_mla", ([pool],), cycle, cycle[1:] + cycle[:1], num_sms=num_sms))


@pytest.mark.parametrize("pattern", ["run", "random"])
@pytest.mark.parametrize("host_layout", ["layer_first", "page_first"])
@every_way
def test_large_enough_for_every_engine(way, host_layout, pattern):
    """17 MiB: where auto leaves the SM kernel, and the staged and pageable paths need each buffer several times."""
    layouts = ("layer_first", host_layout) if way.src == "cuda:0" else (host_layout, "layer_first")
    src, dst = (
        latent_stack(layout, memory, layers=8, pages=37, page_size=64, dim=512)
        for layout, memory in zip(layouts, (way.src, way.dst), strict=True)
    )
    src_pages = list(range(2, 36)) if pattern == "run" else pick(34, 37, seed=1)
    dst_pages = list(range(1, 35)) if pattern == "run" else pick(34, 37, seed=2)
    way = replace(way, index="cpu")
    check(way.call("transfer_kv_all_layer_mla", ([src], [dst]), src_pages, dst_pages, page_indices=True))


@every_way
def test_nothing_stays_allocated(way):
    call = simple_call(way)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        call.run()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


SCRIPT = """
import sys
import warnings

import torch

import kvops

warnings.formatwarning = lambda message, *where, **line: f"{message}\\n"
host, gpu = {"pin_memory": sys.argv[1] == "pinned"}, {"device": "cuda"}
index = torch.arange(4)
for _ in range(2):
    for source, destination in ((host, gpu), (gpu, host)):
        src, dst = torch.ones(8, 16, **source), torch.zeros(8, 16, **destination)
        kvops.transfer_kv_per_layer_mla(src, dst, index, index + 4)
        torch.cuda.synchronize()
        assert dst[4:].all() and not dst[:4].any()
"""


@pytest.mark.parametrize(("memory", "warnings"), [("pageable", 1), ("pinned", 0)])
def test_pageable_memory_is_moved_with_one_warning(memory, warnings):
    command = [sys.executable, "-W", "always", "-c", SCRIPT, memory]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("pageable") == warnings, run.stderr


@needs_two_gpus
@every_pinned_way
def test_another_gpu_is_current(way):
    """The tensors say where to run. The caller's current device stays what it was."""
    call = simple_call(way)
    with torch.cuda.device(1):
        check(call)
        assert torch.cuda.current_device() == 1


@needs_two_gpus
@pytest.mark.parametrize("index", ["cuda:0", "cuda:1", "cpu"])
@pytest.mark.parametrize("engine", [0, 1, 2])
def test_between_gpus(index, engine):
    for src, dst in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
        check(simple_call(Way(src, dst, index, engine)))
