"""Transfers move exactly the rows that they are told to: every layout to every layout, every form of a cache, row size,
dtype, count and kind of index list, by every engine between every two memories. Whole storages are compared.
"""

import itertools

import pytest
import torch
from cases import (
    INDEX_FORMS,
    LATENT_LAYOUTS,
    LAYOUTS,
    STACKS,
    TRANSFERS,
    caches_for,
    cut,
    dense,
    empty,
    kv_cache,
    latent_stack,
    pick,
    strided,
    takes_lists,
)
from reference import POISON, check, synchronize

import kvops

ROW_BYTES = [1, 2, 3, 15, 16, 17, 132, 576, 656, 1152, 8448]
COUNTS = [0, 1, 2, 3, 13, 31, 32, 33, 127, 128, 129, 1009, 1024, 1025]
LAYERS = [0, 1, 2, 3, 13, 31, 32, 33, 127, 128, 129, 300]
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int64,
]


def layout_pairs(layouts):
    """By tokens every layout meets every other. By pages, page sizes must agree: the token form has 1 and stays out."""
    paged = [layout for layout in layouts if layout != "layer_first_tokens"]
    return [
        pytest.param(*pair, pages, id="-".join([*pair, "pages" if pages else "tokens"]))
        for pages, names in ((False, layouts), (True, paged))
        for pair in itertools.product(names, names)
    ]


def index_lists(pages):
    """For a source of 5 pages of 4 and a destination of 7 pages, of 4 as well when whole pages move, else of 3."""
    return (pick(4, 5, seed=1), pick(4, 7, seed=2)) if pages else (pick(11, 20, seed=1), pick(11, 21, seed=2))


# ---- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("src_layout", "dst_layout", "pages"), layout_pairs(LAYOUTS))
def test_layouts_as_lists_of_layers(way, src_layout, dst_layout, pages):
    src = kv_cache(src_layout, way.src, layers=3, pages=5, page_size=4, heads=4, head_dim=8)
    dst = kv_cache(dst_layout, way.dst, layers=3, pages=7, page_size=4 if pages else 3, heads=4, head_dim=8)
    groups = max(src.groups, dst.groups)
    src, dst = src.split_heads(groups), dst.split_heads(groups)
    caches = (src.k, dst.k, src.v, dst.v)
    check(way.call("transfer_kv_all_layer", caches, *index_lists(pages), page_indices=pages))


@pytest.mark.parametrize(("src_layout", "dst_layout", "pages"), layout_pairs(list(STACKS)))
def test_layouts_as_stacks(way, src_layout, dst_layout, pages):
    src = kv_cache(src_layout, way.src, layers=3, pages=5, page_size=4, heads=4, head_dim=8)
    dst = kv_cache(dst_layout, way.dst, layers=3, pages=7, page_size=4 if pages else 3, heads=4, head_dim=8)
    caches = ([src.k_stack], [dst.k_stack], [src.v_stack], [dst.v_stack])
    check(way.call("transfer_kv_all_layer", caches, *index_lists(pages), page_indices=pages))


@pytest.mark.parametrize(("src_layout", "dst_layout", "pages"), layout_pairs(LATENT_LAYOUTS))
def test_layouts_of_latents(way, src_layout, dst_layout, pages):
    src = latent_stack(src_layout, way.src, layers=3, pages=5, page_size=4, dim=72)
    dst = latent_stack(dst_layout, way.dst, layers=3, pages=7, page_size=4 if pages else 3, dim=72)
    check(way.call("transfer_kv_all_layer_mla", ([src], [dst]), *index_lists(pages), page_indices=pages))


@pytest.mark.parametrize("src_layout", LAYOUTS)
def test_layouts_layer_by_layer(way, src_layout):
    src = kv_cache(src_layout, way.src, layers=3, pages=5, page_size=4, heads=4, head_dim=8)
    dst = kv_cache("layer_first", way.dst, layers=3, pages=7, page_size=3, heads=4, head_dim=8).split_heads(src.groups)
    for caches in zip(src.k, dst.k, src.v, dst.v, strict=True):
        check(way.call("transfer_kv_per_layer", caches, *index_lists(pages=False)))


# ---- forms of an argument -------------------------------------------------------------------------------------------

FORMS = {"tokens": (24,), "pages_of_1": (24, 1), "pages_of_4": (6, 4), "pages_of_6": (4, 6)}


@pytest.mark.parametrize("dst_form", FORMS)
@pytest.mark.parametrize("src_form", FORMS)
@pytest.mark.parametrize("op", TRANSFERS)
def test_forms(way, op, src_form, dst_form):
    caches = caches_for(op, way, src=FORMS[src_form], dst=FORMS[dst_form], row=(5, 8), dtype=torch.float16)
    check(way.call(op, caches, pick(10, 24, seed=3), pick(10, 24, seed=4)))


@pytest.mark.parametrize("form", ["list", "stack"])
@pytest.mark.parametrize("op", TRANSFERS)
def test_public_functions(way, op, form):
    """They take any sequence of tensors, and a stacked pool as it is."""
    caches = caches_for(op, way, form)
    if takes_lists(op):
        caches = [cache[0] if form == "stack" else tuple(cache) for cache in caches]
    check(way.call(op, caches, *index_lists(pages=False)), run=lambda call: call.run(kvops))


@pytest.mark.parametrize("cuts", [((1, 1, 1, 1, 1, 1), (6,)), ((2, 4), (3, 3)), ((1, 4, 1), (5, 1)), ((6,), (1, 2, 3))])
def test_lists_cut_differently(way, cuts):
    """A list is the concatenation of its elements along the layer axis. All four lists are cut in another way here."""
    src = kv_cache("page_first", way.src, layers=6, pages=5, page_size=4, heads=2, head_dim=8)
    dst = kv_cache("page_head", way.dst, layers=6, pages=7, page_size=3, heads=2, head_dim=8)
    src_cut, dst_cut = cuts
    caches = (
        cut(src.k_stack, *src_cut),
        cut(dst.k_stack, *dst_cut),
        cut(src.v_stack, *reversed(src_cut)),
        cut(dst.v_stack, *reversed(dst_cut)),
    )
    check(way.call("transfer_kv_all_layer", caches, *index_lists(pages=False)))


@pytest.mark.parametrize("pages", [False, True])
def test_pools_of_different_capacity(way, pages):
    """What a side shares is its index space and page size; its pools may hold more or fewer pages."""
    src_k, src_v = ([dense((pages, 2, 3, 8), memory=way.src) for pages in sizes] for sizes in ((9, 6, 7), (6, 6, 8)))
    dst_k, dst_v = ([dense((pages, 2, 3, 8), memory=way.dst) for pages in sizes] for sizes in ((6, 11, 8), (7, 6, 6)))
    capacity = 6 if pages else 12
    indices = pick(5, capacity, seed=1), pick(5, capacity, seed=2)
    check(way.call("transfer_kv_all_layer", (src_k, dst_k, src_v, dst_v), *indices, page_indices=pages))


@pytest.mark.parametrize("op", ["transfer_kv_per_layer", "transfer_kv_all_layer"])
def test_k_and_v_rows_of_different_size(way, op):
    caches = caches_for(op, way, row=(2, 24), v_row=(3, 8))
    check(way.call(op, caches, *index_lists(pages=False)))


@pytest.mark.parametrize("pages", [False, True])
def test_side_caches_travel_with_the_latents(way, pages):
    """Latents, index keys, scales and a byte of state share an index space, not a row size or a dtype."""
    rows = [(576, torch.bfloat16), (132, torch.uint8), (1, torch.float32), (656, torch.int8), (1, torch.bool)]
    src = [dense((5, 4, dim), dtype, way.src) for dim, dtype in rows]
    dst = [dense((7, 4, dim), dtype, way.dst) for dim, dtype in rows]
    indices = (pick(4, 5), pick(4, 7, seed=1)) if pages else (pick(9, 20), pick(9, 28, seed=1))
    check(way.call("transfer_kv_all_layer_mla", (src, dst), *indices, page_indices=pages))


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src_align", "dst_align"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (1, 16), (16, 8), (4, 2), (8, 1)]
)
@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_row_bytes_and_alignment(way, row_bytes, src_align, dst_align):
    src = dense((13, row_bytes), torch.uint8, way.src, src_align)
    dst = dense((17, row_bytes), torch.uint8, way.dst, dst_align)
    check(way.call("transfer_kv_per_layer_mla", (src, dst), pick(9, 13, seed=1), pick(9, 17, seed=2)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", TRANSFERS)
def test_dtypes(way, op, dtype):
    check(way.call(op, caches_for(op, way, row=(3, 5), dtype=dtype), *index_lists(pages=False)))


STRIDED = {
    "row_pitch": lambda memory: strided((5, 4, 2, 8), memory=memory, holes=(0, 3, 0)),
    "holes_everywhere": lambda memory: strided((5, 4, 2, 8), memory=memory, holes=(5, 3, 1)),
    "heads_outermost": lambda memory: strided((5, 4, 2, 8), memory=memory, order=(2, 0, 1), holes=(7, 0, 1)),
    "pages_innermost": lambda memory: strided((5, 4, 2, 8), memory=memory, order=(1, 2, 0), holes=(0, 1, 1)),
    "slots_outermost": lambda memory: strided((5, 4, 2, 8), memory=memory, order=(1, 0, 2), holes=(1, 0, 0)),
    "every_other_page": lambda memory: dense((9, 4, 2, 8), memory=memory)[::2],
    "slots_of_a_larger_page": lambda memory: dense((5, 7, 2, 8), memory=memory)[:, 2:6],
    "heads_of_a_larger_row": lambda memory: dense((5, 4, 6, 8), memory=memory)[:, :, 3:5],
    "part_of_each_head": lambda memory: dense((5, 4, 2, 15), memory=memory)[..., 6:14],
    "end_of_a_pool": lambda memory: dense((9, 4, 2, 8), memory=memory)[4:],
    "one_element_of_each_head": lambda memory: dense((5, 4, 2, 3), memory=memory)[..., 1:2],
    "one_element_with_any_stride": lambda memory: dense((5, 4, 1, 6), memory=memory).transpose(2, 3)[:, :, 1:3],
}


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("name", STRIDED)
def test_strided_views(way, name, pages):
    """Each view as source of a plain pool, and as destination of one."""
    k, v = STRIDED[name](way.src), STRIDED[name](way.dst)
    plain_k, plain_v = dense(k.shape, memory=way.dst), dense(v.shape, memory=way.src)
    indices = (pick(4, 5, seed=1), pick(4, 5, seed=2)) if pages else (pick(11, 20, seed=1), pick(11, 20, seed=2))
    check(way.call("transfer_kv_per_layer", (k, plain_k, plain_v, v), *indices, page_indices=pages))


def test_source_may_be_expanded(way):
    """One head in memory read as four; one token in memory read as ten."""
    src_k = dense((10, 1, 8), memory=way.src).expand(10, 4, 8)
    src_v = dense((1, 4, 8), memory=way.src).expand(10, 4, 8)
    dst_k, dst_v = (dense((10, 4, 8), memory=way.dst) for _ in "kv")
    check(way.call("transfer_kv_per_layer", (src_k, dst_k, src_v, dst_v), pick(6, 10, seed=1), pick(6, 10, seed=2)))


# ---- how many -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_counts(way, count):
    src, dst = dense((1100, 24), memory=way.src), dense((25, 47, 24), memory=way.dst)
    check(way.call("transfer_kv_per_layer_mla", (src, dst), pick(count, 1100, seed=1), pick(count, 1175, seed=2)))


@pytest.mark.parametrize("form", ["list", "stack"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("op", ["transfer_kv_all_layer", "transfer_kv_all_layer_mla"])
def test_layers(way, op, layers, form):
    caches = caches_for(op, way, form, layers=layers, row=(1, 8))
    check(way.call(op, caches, [3, 0, 17], [20, 4, 5]))


@pytest.mark.parametrize("row", [(0, 8), (2, 0), (0, 0)])
@pytest.mark.parametrize("op", TRANSFERS)
def test_rows_without_bytes(way, op, row):
    check(way.call(op, caches_for(op, way, row=row), [1, 2], [3, 4]))


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("op", TRANSFERS)
def test_no_indices(way, op, pages):
    """No index on either side, no index on one side, and pools of no token with all of them."""
    caches = caches_for(op, way, src=(5, 4), dst=(7, 4))
    check(way.call(op, caches, [], [], page_indices=pages))
    check(way.call(op, caches, [], None, page_indices=pages))
    check(way.call(op, caches, None, [], page_indices=pages))
    check(way.call(op, caches_for(op, way, src=(0, 4), dst=(0, 4)), page_indices=pages))


@pytest.mark.parametrize(("op", "lists"), [("transfer_kv_all_layer", 4), ("transfer_kv_all_layer_mla", 2)])
def test_no_tensor_at_all(op, lists):
    """Such a call has no dispatch key to find a kernel by."""
    for functions in (torch.ops.kvops, kvops):
        assert getattr(functions, op)(*[[]] * lists, None, None) is None


def test_no_layers_with_indices(way):
    for functions in (torch.ops.kvops, kvops):
        way.call("transfer_kv_all_layer", ([], [], [], []), [1], [2]).run(functions)


# ---- which ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["src", "dst", "neither"])
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("op", TRANSFERS)
def test_indices_left_out(way, op, pages, given):
    """A side without indices is read or written from its start, by its own page size; without any, all of both."""
    sides = {"src": (6, 4), "dst": (6, 4) if pages else (8, 3)}
    indices = pick(5, 6) if pages else pick(17, 24)
    src, dst = indices if given == "src" else None, indices if given == "dst" else None
    check(way.call(op, caches_for(op, way, **sides), src, dst, page_indices=pages))


@pytest.mark.parametrize(("src_form", "dst_form"), [*((form, form) for form in INDEX_FORMS), ("every_other", "plain")])
@pytest.mark.parametrize(("src_dtype", "dst_dtype"), [*itertools.product((torch.int32, torch.int64), repeat=2)])
def test_index_dtypes_and_strides(way, src_dtype, dst_dtype, src_form, dst_form):
    caches = caches_for("transfer_kv_per_layer", way)
    src, dst = index_lists(pages=False)
    src = way.indices(src, dtype=src_dtype, form=src_form)
    dst = way.indices(dst, dtype=dst_dtype, form=dst_form)
    check(way.call("transfer_kv_per_layer", caches, src, dst))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_expanded_index(way, dtype):
    """Stride 0: one source row to many places, and many rows to one place."""
    caches = caches_for("transfer_kv_per_layer", way)
    same, many = way.indices([6] * 9, dtype=dtype, form="expanded"), way.indices(pick(9, 20), dtype=dtype)
    check(way.call("transfer_kv_per_layer", caches, same, many))
    check(way.call("transfer_kv_per_layer", caches, many, same))


RUN = list(range(8, 20))
RUNS = {
    "one_run": (RUN, list(range(3, 15))),
    "one_run_from_the_start": (list(range(12)), list(range(12))),
    "to_the_end": (list(range(12, 24)), list(range(9, 21))),
    "run_in_source_only": (RUN, pick(12, 21)),
    "run_in_destination_only": (pick(12, 24), list(range(12))),
    "runs_cut_differently": ([0, 1, 2, 3, 9, 10, 11, 20, 21, 22, 23, 5], [7, 8, 9, 0, 1, 2, 3, 4, 5, 18, 19, 20]),
    "reversed": (RUN[::-1], list(range(12))),
    "both_reversed": (RUN[::-1], list(range(12))[::-1]),
    "every_second": (list(range(0, 24, 2)), list(range(12))),
    "almost_a_run": ([8, 9, 10, 12, 11, 13, 14, 15], [0, 1, 2, 3, 4, 5, 6, 7]),
    "repeated_in_source": ([4, 4, 5, 6, 4, 7, 7], [0, 1, 2, 3, 4, 5, 6]),
    "all_from_one": ([5] * 12, RUN),
}


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head"])
@pytest.mark.parametrize("name", RUNS)
def test_runs(way, name, layout):
    """What a copy engine may merge, and what only looks like it."""
    src = kv_cache(layout, way.src, layers=2, pages=6, page_size=4, heads=2, head_dim=8)
    dst = kv_cache("layer_first", way.dst, layers=2, pages=7, page_size=3, heads=2, head_dim=8)
    caches = ([src.k_stack], [dst.k_stack], [src.v_stack], [dst.v_stack])
    check(way.call("transfer_kv_all_layer", caches, *RUNS[name]))


@pytest.mark.parametrize("name", ["one_run", "runs_cut_differently", "reversed", "repeated_in_source"])
def test_runs_of_pages(way, name):
    src = kv_cache("page_first_direct", way.src, layers=2, pages=24, page_size=2, heads=2, head_dim=8)
    dst = kv_cache("page_first_direct", way.dst, layers=2, pages=21, page_size=2, heads=2, head_dim=8)
    caches = ([src.k_stack], [dst.k_stack], [src.v_stack], [dst.v_stack])
    check(way.call("transfer_kv_all_layer", caches, *RUNS[name], page_indices=True))


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("op", TRANSFERS)
def test_repeated_destinations(way, op, pages):
    """Every byte comes from one of the sources."""
    caches = caches_for(op, way, src=(6, 4), dst=(7, 4))
    check(way.call(op, caches, [0, 1, 2, 3, 4, 5, 0], [3, 3, 1, 3, 6, 1, 0], page_indices=pages))


# ---- where ----------------------------------------------------------------------------------------------------------


def test_layers_of_one_pool(pool_way):
    """Planes of one storage that share no byte are a source and a destination like any other."""
    pool = kv_cache("page_first", pool_way.src, layers=4, pages=5, page_size=4, heads=2, head_dim=8).k
    check(pool_way.call("transfer_kv_per_layer", pool, pick(9, 20), pick(9, 20, seed=1)))


def test_k_and_v_interleaved_in_one_pool(way):
    src, dst = (dense((5, 4, 3, 2, 2, 8), memory=memory).permute(3, 2, 0, 1, 4, 5) for memory in (way.src, way.dst))
    caches = ([src[0]], [dst[0]], [src[1]], [dst[1]])
    check(way.call("transfer_kv_all_layer", caches, pick(9, 20), pick(9, 20, seed=1)))


GIB = 1 << 30
LAST = (5 << 20) - 1  # the last of 5 Mi tokens of 1 KiB

# Views [layers, pages, page_size, heads, head_dim] of 5 GiB, each with another stride beyond 2^31, and tokens to move.
VIEWS_OF_5_GIB = {
    "tokens": (lambda pool: pool.view(1, -1, 1, 1, 1024), [0, (1 << 21) - 1, 1 << 21, (1 << 22) - 1, 1 << 22, LAST]),
    "pages": (lambda pool: pool.view(1, -1, 64, 1, 1024), [0, (1 << 21) - 1, 1 << 21, (1 << 22) - 1, 1 << 22, LAST]),
    "far_pages": (lambda pool: pool.view(1, 5, -1, 1, 1024)[:, :, :3], [0, 5, 10, 14, 8]),
    "far_slots": (lambda pool: pool.view(1, 5, -1, 1, 1024).transpose(1, 2), [0, 4, 5003, LAST]),
    "far_heads": (lambda pool: pool.view(1, 5, -1, 1, 1024).permute(0, 2, 3, 1, 4), [0, 77, (1 << 20) - 1]),
    "far_layers": (lambda pool: pool.view(5, -1, 1, 1, 1024), [0, 77, (1 << 20) - 1]),
}


@pytest.mark.parametrize("big", ["src", "dst"])
@pytest.mark.parametrize("name", VIEWS_OF_5_GIB)
def test_offsets_beyond_32_bits(way, name, big):
    """Byte and element offsets beyond 2^31 and 2^32. In host memory only the touched part of the pool is committed."""
    view, tokens = VIEWS_OF_5_GIB[name]
    pool = view(empty(5 * GIB, getattr(way, big)))
    layers, pages, page_size, heads, _ = pool.shape
    small = dense((layers, len(tokens), 1, heads, 1024), torch.uint8, way.dst if big == "src" else way.src)

    def row(token):
        return pool[:, token // page_size, token % page_size]

    neighbours = {near for token in tokens for near in (token - 1, token + 1) if 0 <= near < pages * page_size}
    for near in neighbours:
        row(near).fill_(POISON)
    values = torch.randint(0, POISON, small.shape, dtype=torch.uint8)
    if big == "src":
        small.fill_(POISON)
        for i, token in enumerate(tokens):
            row(token).copy_(values[:, i, 0])
    else:
        small.copy_(values)

    # V has rows of no bytes, and so takes no memory: pools of one side share their index space.
    pool_v, small_v = pool[..., :0], small[..., :0]
    if big == "src":
        call = way.call("transfer_kv_all_layer", ([pool], [small], [pool_v], [small_v]), tokens, None)
    else:
        call = way.call("transfer_kv_all_layer", ([small], [pool], [small_v], [pool_v]), None, tokens)
    call.run()
    synchronize(call)

    assert torch.equal(small.cpu(), values)
    for i, token in enumerate(tokens):
        assert torch.equal(row(token).cpu(), values[:, i, 0]), f"token {token}"
    for near in neighbours - set(tokens):
        assert (row(near).cpu() == POISON).all(), f"token {near}, beside one that moves"
