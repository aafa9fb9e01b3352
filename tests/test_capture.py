"""In a CUDA graph a transfer reads and writes what the memory holds at replay; what cannot be captured says so.

A call that capture would lose without a word is the worst case: the graph replays, and nothing moves.
"""

import re
from dataclasses import replace

import pytest
import torch
from cases import CACHES, MOVES, TRANSFERS, Way, dense, pick
from cuda_cases import PINNED_WAYS, SM_POOLS, SM_WAYS, cuda_test, simple_call
from reference import POISON, Snapshot, assert_bytes, check, expected, fill, reachable, storage_bytes

import kvops

pytestmark = cuda_test


def captured(*functions):
    """A graph of what the functions do on the capturing stream."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    return graph


@pytest.mark.parametrize(
    ("op", "way"),
    [(op, way) for op in CACHES for way in (SM_POOLS if op in MOVES else SM_WAYS)],
    ids=str,
)
def test_capture_and_replay_with_other_indices(op, way):
    """Values of GPU indices and the content of all caches, pinned memory too, are read when the graph runs."""
    call = simple_call(way, op)
    call.run()
    fill(call)
    graph = captured(call.run)
    written = [tensor for _, destinations in call.pairs() for tensor in destinations]
    if op in TRANSFERS:
        assert all((storage_bytes(tensor).cpu() == POISON).all() for tensor in written), "capture must not run the call"
    for seed in range(3):
        call.src_indices.copy_(torch.tensor(pick(11, 20, seed=10 + seed)))
        call.dst_indices.copy_(torch.tensor(pick(11, 20, seed=20 + seed)))
        check(call, run=lambda _: graph.replay())


def test_captured_transfers_keep_their_order():
    """Host to GPU, a move within the GPU, and back to the host, as one graph."""
    host, pool = dense((16, 8), torch.float32, "pinned"), dense((16, 8), torch.float32, "cuda:0")
    slots = torch.arange(16, device="cuda:0")
    back = slots.flip(0)

    def step():
        kvops.transfer_kv_per_layer_mla(host, pool, slots, slots)
        kvops.move_kv_mla([pool], slots, back)
        pool.add_(1)
        kvops.transfer_kv_per_layer_mla(pool, host, slots, slots)

    step()
    graph = captured(step)
    for start in (0, 1000):
        host.copy_(torch.arange(start, start + 128).view(16, 8))
        rows = host.clone()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(host, rows.flip(0) + 1)


NOT_CAPTURABLE = [
    *(Way(*places, "cuda:0", engine) for places in (("cpu", "cuda:0"), ("cuda:0", "cpu")) for engine in (0, 1, 2, 3)),
    *(Way(*places, "cuda:0", engine) for places in (("pinned", "cuda:0"), ("cuda:0", "pinned")) for engine in (2, 3)),
    Way("cuda:0", "cuda:0", "cuda:0", engine=2),
]


@pytest.mark.parametrize("way", NOT_CAPTURABLE, ids=str)
def test_what_cannot_be_captured_says_so(way):
    """Pageable memory needs the host, and the copy engine index values, whenever the graph runs. The refusal costs
    nothing: calls before and after it in the same capture are in the graph, and the refused one works outside of it."""
    refused = simple_call(way)
    before, after = (simple_call(Way("pinned", "cuda:0", "cuda:0")) for _ in range(2))
    for call in (before, after, refused):
        call.run()
        fill(call)

    def expect_refusal():
        with pytest.raises(RuntimeError, match=r"kvops\.transfer_kv_all_layer: .*captur"):
            refused.run()

    graph = captured(before.run, expect_refusal, after.run)
    for call in (before, after):
        check(call, run=lambda _: graph.replay())
    assert all((storage_bytes(tensor).cpu() == POISON).all() for _, d in refused.pairs() for tensor in d)
    check(refused)


@pytest.mark.parametrize("count", [11, 5000])
@pytest.mark.parametrize("way", [replace(way, index="cpu") for way in PINNED_WAYS], ids=str)
def test_captured_or_refused_but_never_lost(way, count):
    """Indices in host memory: a graph that holds the call holds the values that they had at capture."""
    src, dst = dense((6000, 40), memory=way.src), dense((6000, 40), memory=way.dst)
    values = pick(count, 6000, seed=1), pick(count, 6000, seed=2)
    call = way.call("transfer_kv_per_layer_mla", (src, dst), *values)
    call.run()
    refusals = []

    def run():
        try:
            call.run()
        except RuntimeError as error:
            refusals.append(str(error))

    marker = torch.zeros(1, device="cuda:0")  # so that the graph is not empty
    graph = captured(lambda: marker.add_(1), run)
    if refusals:
        assert re.search("captur", refusals[0])
        assert way.engine != 0, "auto picks what can be captured"
        check(call)
        return
    fill(call)
    alternatives = expected(call, Snapshot(reachable(call).values()))
    for tensor in (call.src_indices, call.dst_indices):
        tensor.zero_()
    for size in range(8, 20):  # whatever pinned memory the call has given back
        torch.zeros(1 << size, dtype=torch.uint8, pin_memory=True)
    graph.replay()
    torch.cuda.synchronize()
    for tensor, value in zip((call.src_indices, call.dst_indices), values, strict=True):
        tensor.copy_(torch.tensor(value))
    assert_bytes(call, alternatives, call.op)
