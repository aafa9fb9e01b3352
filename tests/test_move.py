"""Moves within one pool gather every row before they scatter any: index sets may overlap in every way."""

import pytest
import torch
from cases import INDEX_FORMS, LAYOUTS, MOVES, caches_for, cut, dense, kv_cache, latent_stack, pick, strided
from reference import check

import kvops

INDEX_SETS = {  # of 24 tokens or pages
    "none": ([], []),
    "one": ([5], [11]),
    "disjoint": ([0, 2, 4, 6, 8], [23, 1, 9, 13, 5]),
    "rotation": ([0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 0]),
    "rotation_backwards": ([1, 2, 3, 4, 5, 6, 0], [0, 1, 2, 3, 4, 5, 6]),
    "shift_up": (list(range(0, 20)), list(range(3, 23))),
    "shift_down": (list(range(4, 24)), list(range(0, 20))),
    "reversal": (list(range(24)), list(range(24))[::-1]),
    "swap": ([3, 17], [17, 3]),
    "chain": ([1, 2, 3, 4], [2, 3, 4, 5]),
    "chain_listed_backwards": ([4, 3, 2, 1], [5, 4, 3, 2]),
    "permutation_of_all": (list(range(24)), pick(24, 24, seed=7)),
    "partly_overlapping": (pick(12, 24, seed=1), pick(12, 24, seed=2)),
    "identical": ([9, 4, 7], [9, 4, 7]),
    "repeated_in_source": ([3, 3, 5, 3, 4], [4, 5, 3, 0, 1]),
    "repeated_in_destination": ([3, 4, 5, 6, 7], [4, 4, 3, 4, 6]),
}


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("name", INDEX_SETS)
@pytest.mark.parametrize("op", MOVES)
def test_index_sets(pool_way, op, name, pages):
    caches = caches_for(op, pool_way, src=(24, 3) if pages else (6, 4))
    check(pool_way.call(op, caches, *INDEX_SETS[name], page_indices=pages))


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(pool_way, layout, pages):
    """Interleaved layers, heads, K and V are parts of one storage: the rest of it stays."""
    pages = pages and layout != "layer_first_tokens"
    pool = kv_cache(layout, pool_way.src, layers=3, pages=8, page_size=3, heads=4, head_dim=8)
    capacity = 8 if pages else 24
    indices = pick(6, capacity, seed=1), pick(6, capacity, seed=2)
    check(pool_way.call("move_kv", (pool.k, pool.v), *indices, page_indices=pages))
    if pool.k_stack is not None:
        caches = (cut(pool.k_stack, 1, 2), cut(pool.v_stack, 2, 1))
        check(pool_way.call("move_kv", caches, *indices, page_indices=pages))


@pytest.mark.parametrize("form", ["list", "stack"])
@pytest.mark.parametrize("op", MOVES)
def test_public_functions(pool_way, op, form):
    caches = [cache[0] if form == "stack" else tuple(cache) for cache in caches_for(op, pool_way, form)]
    check(pool_way.call(op, caches, [0, 1, 2], [1, 2, 0]), run=lambda call: call.run(kvops))


@pytest.mark.parametrize("form", ["tokens", "pages_of_1", "pages_of_4"])
@pytest.mark.parametrize("op", MOVES)
def test_forms(pool_way, op, form):
    side = {"tokens": (24,), "pages_of_1": (24, 1), "pages_of_4": (6, 4)}[form]
    check(pool_way.call(op, caches_for(op, pool_way, src=side), *INDEX_SETS["partly_overlapping"]))


@pytest.mark.parametrize("align", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("row_bytes", [1, 3, 16, 17, 132, 576, 8448])
def test_row_bytes(pool_way, row_bytes, align):
    pool = dense((24, row_bytes), torch.uint8, pool_way.src, align)
    check(pool_way.call("move_kv_mla", ([pool],), *INDEX_SETS["rotation"]))


@pytest.mark.parametrize("pages", [False, True])
def test_strided_pools(pool_way, pages):
    k = strided((8, 3, 2, 8), memory=pool_way.src, order=(2, 0, 1), holes=(5, 3, 1), align=2)
    v = dense((17, 5, 4, 9), memory=pool_way.src)[::2, 1:4, 1:3, :8]
    v = v[:8]
    capacity = 8 if pages else 24
    indices = pick(6, capacity, seed=3), pick(6, capacity, seed=4)
    check(pool_way.call("move_kv", ([k], [v]), *indices, page_indices=pages))


def test_rows_of_different_size(pool_way):
    k, v = dense((24, 2, 8), memory=pool_way.src), dense((24, 1, 6), torch.float32, pool_way.src)
    check(pool_way.call("move_kv", ([k], [v]), *INDEX_SETS["reversal"]))
    rows = [(576, torch.bfloat16), (132, torch.uint8), (1, torch.float32)]
    caches = [dense((24, dim), dtype, pool_way.src) for dim, dtype in rows]
    check(pool_way.call("move_kv_mla", (caches,), *INDEX_SETS["reversal"]))


@pytest.mark.parametrize("layers", [0, 1, 2, 33, 129, 300])
def test_layers(pool_way, layers):
    check(pool_way.call("move_kv_mla", caches_for("move_kv_mla", pool_way, layers=layers), [0, 1, 2], [1, 2, 0]))
    stack = latent_stack("page_first", pool_way.src, layers, 5, 4, 8)
    check(pool_way.call("move_kv_mla", ([stack],), [0, 1, 2], [1, 2, 0]))


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 1023, 1024, 1025, 4099])
def test_counts(pool_way, count):
    """A rotation needs every row of the cycle kept before the first is overwritten, however many there are."""
    pool = dense((4100, 24), memory=pool_way.src)
    cycle = pick(count, 4100)
    check(pool_way.call("move_kv_mla", ([pool],), cycle, cycle[1:] + cycle[:1]))


def test_rotation_of_large_rows(pool_way):
    """As many bytes as must be staged in pieces."""
    pool = dense((2, 60, 64, 1024), torch.int64, pool_way.src)  # 60 MiB
    check(pool_way.call("move_kv_mla", ([pool],), list(range(60)), [*range(1, 60), 0], page_indices=True))


@pytest.mark.parametrize("form", INDEX_FORMS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_dtypes_and_strides(pool_way, dtype, form):
    src, dst = (pool_way.indices(side, dtype=dtype, form=form) for side in INDEX_SETS["partly_overlapping"])
    check(pool_way.call("move_kv", caches_for("move_kv", pool_way, src=(6, 4)), src, dst))


@pytest.mark.parametrize("row", [(0, 8), (2, 0)])
@pytest.mark.parametrize("op", MOVES)
def test_nothing_to_move(pool_way, op, row):
    check(pool_way.call(op, caches_for(op, pool_way, row=row), [1, 2], [2, 1]))
    check(pool_way.call(op, caches_for(op, pool_way, layers=0), [1], [2]))
    check(pool_way.call(op, caches_for(op, pool_way, src=(0, 4)), [], []))
