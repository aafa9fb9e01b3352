"""An index value on the GPU that lies outside: its row is skipped, the others move, and the next call says so.

The kernel finds it when it uses the index. The context lives, and every test ends with a good call that works.
"""

import re
import threading

import pytest
import torch
from cases import TRANSFERS, Way, caches_for, dense, pick, takes_lists
from cuda_cases import cuda_test, every_sm_pool, every_sm_way, simple_call
from reference import Snapshot, assert_bytes, check, expected, fill, reachable

pytestmark = cuda_test


def fault(op, text):
    return re.escape(f"kvops.{op}: {text} (found on the device in an earlier call; its other rows were moved)") + "$"


def assert_moves_what_is_good(call, good):
    """`call` is `good`, on the same caches, and bad indices besides."""
    fill(call)
    alternatives = expected(good, Snapshot(reachable(good).values()))
    call.run()
    assert_bytes(good, alternatives, "the good rows of a call with bad ones")


def assert_next_call_raises(match, call):
    """Once, before anything moves; after that the call works."""
    fill(call)
    before = Snapshot(reachable(call).values())
    with pytest.raises(RuntimeError, match=match):
        call.run()
    assert_bytes(call, [before], "a call that raised")
    check(call)


@pytest.mark.parametrize("bad", [20, 21, -1, 1 << 30])
@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("op", TRANSFERS)
@every_sm_way
def test_bad_index_on_the_gpu(way, op, side, bad):
    """The bad row is skipped, the others move, the context lives, and the next call says what happened."""
    src, dst = [0, 19, 7, 3, 12], [5, 1, 19, 0, 8]
    good = way.call(op, caches_for(op, way, src=(5, 4), dst=(5, 4)), src[:3] + src[4:], dst[:3] + dst[4:])
    (src if side == "src" else dst)[3] = bad
    indices = [way.indices(values, dtype=torch.int32) for values in (src, dst)]
    call = way.call(op, good.caches, *indices)
    assert_moves_what_is_good(call, good)

    argument = side if op.endswith("_mla") else f"{side}_k"
    limit_of = f"{argument}[0]" if takes_lists(op) else argument
    text = f"{side}_indices[3] is {bad}, expected 0 <= index < 20, the tokens of {limit_of}"
    assert_next_call_raises(fault(op, text), good)


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("pages", [False, True])
@every_sm_pool
def test_bad_index_of_a_move_on_the_gpu(way, pages, side):
    caches = caches_for("move_kv", way, src=(20, 2) if pages else (5, 4))
    src, dst = [0, 1, 2, 3], [1, 2, 3, 0]
    good = way.call("move_kv", caches, src[:2] + src[3:], dst[:2] + dst[3:], page_indices=pages)
    (src if side == "src" else dst)[2] = 99
    call = way.call("move_kv", caches, src, dst, page_indices=pages)
    assert_moves_what_is_good(call, good)
    unit = "pages" if pages else "tokens"
    text = f"{side}_indices[2] is 99, expected 0 <= index < 20, the {unit} of k[0]"
    assert_next_call_raises(fault("move_kv", text), good)


def test_fault_reaches_another_operator_and_another_thread():
    way = Way("cuda:0", "cuda:0", "cuda:0")
    src, dst = caches_for("transfer_kv_per_layer_mla", way, src=(20,), dst=(20,))
    bad = way.call("transfer_kv_per_layer_mla", (src, dst), [0, 44], [1, 2])
    bad.run()
    torch.cuda.synchronize()
    match = fault(bad.op, "src_indices[1] is 44, expected 0 <= index < 20, the tokens of src")
    failures = []

    def work():
        try:
            assert_next_call_raises(match, simple_call(way, "move_kv"))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures, failures[0]


@every_sm_way
def test_many_bad_indices_are_one_fault(way):
    """Every other index of a thousand is bad. The first that is met is named, all good rows move, one call raises."""
    src, dst = dense((2000, 24), memory=way.src), dense((2000, 24), memory=way.dst)
    good_src, good_dst = pick(500, 2000, seed=1), pick(500, 2000, seed=2)
    good = way.call("transfer_kv_per_layer_mla", (src, dst), good_src, good_dst)
    mixed = [index for pair in zip(good_src, range(2000, 2500), strict=True) for index in pair]
    call = way.call("transfer_kv_per_layer_mla", (src, dst), mixed, [index for index in good_dst for _ in range(2)])
    assert_moves_what_is_good(call, good)
    match = r"src_indices\[\d*[13579]\] is 2\d\d\d, expected 0 <= index < 2000, .*, and 499 more like it \("
    assert_next_call_raises(match, good)


def test_bad_index_in_a_replayed_graph():
    way = Way("pinned", "cuda:0", "cuda:0")
    call = simple_call(way, "transfer_kv_per_layer")
    call.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    kept = call.dst_indices.clone()
    call.dst_indices[4] = -7
    graph.replay()
    torch.cuda.synchronize()
    call.dst_indices.copy_(kept)
    text = "dst_indices[4] is -7, expected 0 <= index < 21, the tokens of dst_k"
    assert_next_call_raises(fault(call.op, text), call)
