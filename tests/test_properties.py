"""What holds for every call that is in order, on cases that nobody thought of.

Hypothesis draws shapes, the order of the dimensions in memory, holes, alignment, cuts of the lists, dtypes and indices,
and shrinks what fails. Strides drawn this way contain every named layout.
"""

import pytest
import torch
from cases import CPU_WAY, INDEX_FORMS, MOVES, TRANSFERS, cuda_pools, cuda_ways, is_mla, strided, takes_lists
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Snapshot, check, fill

import kvops

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn, torch.bool]


def small(least, most):
    return st.integers(least, most)


@st.composite
def tensors(draw, memory, layers, pages, page_size, row, dtype, stack):
    """One cache tensor with any strides: a stack of layers, or one layer in the paged or the token form."""
    shape = [*([layers] if stack else []), pages, page_size, *row]
    if not stack and page_size == 1 and draw(st.booleans()):
        shape = [pages, *row]
    outer = len(shape) - 1
    order = draw(st.permutations(range(outer)))
    holes = draw(st.lists(small(0, 3), min_size=outer, max_size=outer))
    align = draw(st.sampled_from([align for align in (1, 2, 4, 8, 16, 64) if align >= dtype.itemsize]))
    return strided(shape, dtype, memory, order, holes, align)


@st.composite
def cache_lists(draw, memory, layers, pages, page_size, row, dtype):
    """All layers as a list that is cut anywhere; pieces of one layer may come with a layer dimension or without."""
    pieces = []
    while layers:
        piece = draw(small(1, layers))
        layers -= piece
        stack = piece > 1 or draw(st.booleans())
        pieces.append(draw(tensors(memory, piece, pages, page_size, row, dtype, stack)))
    return pieces


@st.composite
def rows(draw, mla):
    return (draw(small(0, 40)),) if mla else (draw(small(1, 4)), draw(small(1, 20)))


@st.composite
def index_tensors(draw, way, values):
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return way.indices(values, dtype=dtype, form=draw(st.sampled_from(INDEX_FORMS)))


@st.composite
def index_lists(draw, count, capacity, repeat):
    """Any indices; distinct ones unless `repeat`."""
    if repeat and capacity:
        return draw(st.lists(small(0, capacity - 1), min_size=count, max_size=count))
    return draw(st.permutations(range(capacity)))[:count]


@st.composite
def transfers(draw, way):
    op = draw(st.sampled_from(TRANSFERS))
    mla, pages = is_mla(op), draw(st.booleans())
    layers = draw(small(0, 5)) if takes_lists(op) else 1
    src_size = draw(small(1, 5))
    dst_size = src_size if pages else draw(small(1, 5))
    src_pages, dst_pages = draw(small(1, 6)), draw(small(1, 6))

    caches = []
    for _ in range(1 if mla else 2):
        row, dtype = draw(rows(mla)), draw(st.sampled_from(DTYPES))
        for side in ((way.src, layers, src_pages, src_size), (way.dst, layers, dst_pages, dst_size)):
            if takes_lists(op):
                caches.append(draw(cache_lists(*side, row, dtype)))
            else:
                caches.append(draw(tensors(*side, row, dtype, stack=False)))

    src_capacity, dst_capacity = (src_pages, dst_pages) if pages else (src_pages * src_size, dst_pages * dst_size)
    count = draw(small(0, min(src_capacity, dst_capacity)))
    src = draw(index_lists(count, src_capacity, repeat=draw(st.booleans())))
    dst = draw(index_lists(count, dst_capacity, repeat=draw(st.integers(0, 4)) == 0))
    left_out = draw(st.sampled_from(["src", "dst", "nothing"]))
    src_indices = None if left_out == "src" else draw(index_tensors(way, src))
    dst_indices = None if left_out == "dst" else draw(index_tensors(way, dst))
    return way.call(op, caches, src_indices, dst_indices, page_indices=pages)


@st.composite
def moves(draw, way):
    op = draw(st.sampled_from(MOVES))
    mla, pages = is_mla(op), draw(st.booleans())
    layers, pool_pages, page_size = draw(small(0, 5)), draw(small(1, 6)), draw(small(1, 5))
    caches = [
        draw(cache_lists(way.src, layers, pool_pages, page_size, draw(rows(mla)), draw(st.sampled_from(DTYPES))))
        for _ in range(1 if mla else 2)
    ]
    capacity = pool_pages if pages else pool_pages * page_size
    count = draw(small(0, capacity))
    src = draw(index_lists(count, capacity, repeat=draw(st.booleans())))
    dst = draw(index_lists(count, capacity, repeat=draw(st.integers(0, 4)) == 0))
    return way.call(op, caches, draw(index_tensors(way, src)), draw(index_tensors(way, dst)), page_indices=pages)


@settings(max_examples=400)
@given(transfers(CPU_WAY))
def test_transfers(call):
    check(call)


@settings(max_examples=250)
@given(moves(CPU_WAY))
def test_moves(call):
    check(call)


@settings(max_examples=60)
@given(st.one_of(transfers(CPU_WAY), moves(CPU_WAY)))
def test_public_functions_are_the_operators(call):
    check(call, run=lambda call: call.run(kvops))


@st.composite
def round_trips(draw, way):
    """Out by some indices into a pool of another shape, and back by the same."""
    row, layers = draw(rows(mla=True)), draw(small(1, 4))
    near_size, far_size = draw(small(1, 4)), draw(small(1, 4))
    near_pages, far_pages = draw(small(1, 6)), draw(small(1, 6))
    near = draw(cache_lists(way.src, layers, near_pages, near_size, row, torch.bfloat16))
    far = draw(cache_lists(way.dst, layers, far_pages, far_size, row, torch.bfloat16))
    near_capacity, far_capacity = near_pages * near_size, far_pages * far_size
    count = draw(small(0, min(near_capacity, far_capacity)))
    near_indices = way.indices(draw(index_lists(count, near_capacity, repeat=False)))
    far_indices = way.indices(draw(index_lists(count, far_capacity, repeat=False)))
    out = way.call("transfer_kv_all_layer_mla", (near, far), near_indices, far_indices)
    back = way.call("transfer_kv_all_layer_mla", (far, near), far_indices, near_indices)
    return out, back


@settings(max_examples=60)
@given(round_trips(CPU_WAY))
def test_out_and_back_changes_nothing(calls):
    out, back = calls
    near = [tensor for name, tensor in out.named_caches().items() if name.startswith("src")]
    fill(out)
    before = Snapshot(near)
    out.run()
    back.run()
    after = Snapshot(near)
    assert all(torch.equal(after.storages[key], before.storages[key]) for key in before.storages)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:.*pageable")
@settings(max_examples=600)
@given(st.data())
def test_transfers_on_cuda(data):
    check(data.draw(transfers(data.draw(st.sampled_from(cuda_ways())))))


@pytest.mark.cuda
@settings(max_examples=300)
@given(st.data())
def test_moves_on_cuda(data):
    check(data.draw(moves(data.draw(st.sampled_from(cuda_pools())))))
