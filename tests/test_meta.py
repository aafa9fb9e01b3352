"""The fakes on sizes that are not numbers: one graph serves every number of tokens, pages, layers and indices, and what
they refuse alone. test_bad_calls.py has the table of all other messages.
"""

import pytest
import torch
from cases import CACHES, CPU_WAY, MOVES, caches_for, dense, is_mla, pick, takes_lists
from reference import check
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

import kvops

MLA = "transfer_kv_per_layer_mla"
ALL_MLA = "transfer_kv_all_layer_mla"
NO_GRADIENT = "requires grad, expected one that does not: a transfer writes in place and records no gradient"
MARKS = {"backed": torch._dynamo.mark_dynamic, "unbacked": mark_unbacked}

# (layers, pages of the source, pages of the destination, indices)
SIZES = [(3, 5, 7, 6), (2, 9, 4, 11), (4, 6, 6, 2)]
ZERO_AND_ONE = [(1, 3, 2, 1), (2, 1, 1, 0)]  # PyTorch specializes these for a backed size, and only then


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def on_meta(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), tree)


def paged_call(op, layers, src_pages, dst_pages, count):
    """Pages of 4 tokens to pages of 3; stacked pools where the operator takes lists."""
    caches = caches_for(op, CPU_WAY, "stack", layers=layers, src=(src_pages, 4), dst=(dst_pages, 3))
    dst_tokens = src_pages * 4 if op in MOVES else dst_pages * 3
    return CPU_WAY.call(op, caches, pick(count, src_pages * 4), pick(count, dst_tokens, seed=1))


def mark_sizes(call, mark):
    """Layers, pages and numbers of indices; page size and row stay numbers."""
    for cache in call.named_caches().values():
        for dim in range(2 if takes_lists(call.op) else 1):
            mark(cache, dim)
    for indices in (call.src_indices, call.dst_indices):
        mark(indices, 0)


# ---- sizes that are symbols -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("functions", [torch.ops.kvops, kvops], ids=["operator", "public"])
@pytest.mark.parametrize("kind", MARKS)
@pytest.mark.parametrize("op", CACHES)
def test_one_graph_for_all_sizes(op, kind, functions):
    """A fake that guards on a size, or asks for one that only the data know, takes a second graph or none at all."""
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(getattr(functions, op), backend=counter, fullgraph=True)
    for sizes in SIZES + (ZERO_AND_ONE if kind == "unbacked" else []):
        call = paged_call(op, *sizes)
        mark_sizes(call, MARKS[kind])
        check(call, run=lambda call: step(*call.args, **call.options))
    assert counter.frame_count == 1


@pytest.mark.parametrize("op", ["transfer_kv_all_layer", "move_kv_mla"])
def test_one_graph_for_all_sizes_with_inductor(op):
    counter = CompileCounterWithBackend("inductor")
    step = torch.compile(getattr(kvops, op), backend=counter, fullgraph=True)
    for sizes in (SIZES[0], ZERO_AND_ONE[1]):
        call = paged_call(op, *sizes)
        mark_sizes(call, mark_unbacked)
        check(call, run=lambda call: step(*call.args, **call.options))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", MARKS)
def test_one_side_without_indices(kind):
    """Here sizes are compared, index count against tokens: still one graph, for every call that fits."""
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(kvops.transfer_kv_per_layer_mla, backend=counter, fullgraph=True)
    for src_pages, dst_pages, count in ((5, 7, 6), (4, 3, 9), (9, 2, 2)):
        caches = caches_for(MLA, CPU_WAY, src=(src_pages, 4), dst=(dst_pages, 3))
        call = CPU_WAY.call(MLA, caches, pick(count, src_pages * 4))
        for tensor in (*caches, call.src_indices):
            MARKS[kind](tensor, 0)
        check(call, run=lambda call: step(*call.args, **call.options))
    assert counter.frame_count == 1


def unbacked_lists(src_layers, dst_layers, dst_dim=8):
    src, dst = ([dense((n, 5, 4, dim)) for n in cut] for cut, dim in ((src_layers, 8), (dst_layers, dst_dim)))
    for stack in (*src, *dst):
        mark_unbacked(stack, 0)
    return CPU_WAY.call(ALL_MLA, (src, dst), pick(6, 20), pick(6, 20, seed=1))


def test_lists_cut_in_unbacked_places():
    """Which stacks of the two lists meet is open at trace time; the kernel knows."""
    step = torch.compile(kvops.transfer_kv_all_layer_mla, backend="aot_eager", fullgraph=True)
    for cuts in (([3, 2], [2, 3]), ([4, 1], [1, 4])):
        check(unbacked_lists(*cuts), run=lambda call: step(*call.args, **call.options))


def test_first_stacks_of_two_lists_meet_in_any_case():
    step = torch.compile(kvops.transfer_kv_all_layer_mla, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"dst\[0\] has dim 7, expected 8 as src\[0\]"):
        step(*unbacked_lists([3, 2], [2, 3], dst_dim=7).args)


def test_numbers_of_indices_from_data_that_disagree():
    """Unknown until the graph runs, which refuses them before a byte moves."""

    def step(src, dst, wanted, places):
        kvops.transfer_kv_per_layer_mla(src, dst, wanted.nonzero().squeeze(1), places.nonzero().squeeze(1))

    src, dst = torch.ones(16, 8), torch.zeros(16, 8)
    three, four = torch.arange(16) < 3, torch.arange(16) >= 12
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
        step(src, dst, three, three)
        assert torch.equal(dst, three[:, None].expand(16, 8).float())
        dst.zero_()
        with pytest.raises(RuntimeError, match=r"u0 == u1|Eq\(u0, u1\)|4 elements, expected 3"):
            step(src, dst, three, four)
    assert not dst.any()


@pytest.mark.parametrize("op", CACHES)
def test_export_takes_no_indices_at_all(op):
    class Step(torch.nn.Module):
        def forward(self, caches, src_indices, dst_indices):
            getattr(kvops, op)(*caches, src_indices, dst_indices)
            return src_indices + 1

    count = Dim("count", min=0)
    cache = [{1: Dim.AUTO}] if takes_lists(op) else {0: Dim.AUTO}
    example = paged_call(op, *SIZES[0])
    exported = export(
        Step(),
        (example.caches, example.src_indices, example.dst_indices),
        dynamic_shapes=((cache,) * len(example.caches), {0: count}, {0: count}),
    )
    step = exported.module()
    for src_pages, dst_pages, number in ((5, 7, 6), (9, 4, 0), (3, 4, 1)):
        call = paged_call(op, SIZES[0][0], src_pages, dst_pages, number)
        check(call, run=lambda call: step(call.caches, call.src_indices, call.dst_indices))


# ---- tensors on meta ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", list(kvops.Engine))
@pytest.mark.parametrize("op", CACHES)
def test_meta_tensors_take_every_engine(op, engine):
    """Meta tensors may stand for caches in any place."""
    call = paged_call(op, *SIZES[0])
    assert getattr(kvops, op)(*on_meta(call.args), engine=engine) is None


@pytest.mark.parametrize("op", CACHES)
def test_meta_tensors_are_checked(op):
    """In the operator's own words, with nothing around them."""
    call = paged_call(op, *SIZES[0])
    with pytest.raises(RuntimeError) as error:
        getattr(kvops, op)(*on_meta((*call.caches, call.src_indices, call.dst_indices[1:])))
    assert str(error.value) == f"kvops.{op}: dst_indices has 5 elements, expected 6 as src_indices"


@pytest.mark.parametrize("op", CACHES)
def test_a_mix_of_meta_and_real_is_refused(op):
    """Each argument in turn: none is left to a kernel that would read it."""
    call = paged_call(op, *SIZES[0])
    names = [*call.named_caches(), "src_indices", "dst_indices"]
    for i, name in enumerate(names):
        args = [on_meta(arg) if n == i else arg for n, arg in enumerate(call.args)]
        with pytest.raises(RuntimeError) as error:
            getattr(torch.ops.kvops, op)(*args)
        assert str(error.value) == f"kvops.{op}: {name} is on meta, expected all tensors on meta or none"


def test_zero_layers_as_a_stack_and_as_an_empty_list():
    stack = torch.zeros(0, 5, 4, 8, device="meta")
    index = torch.zeros(3, dtype=torch.int64, device="meta")
    for caches in (([stack], []), ([], [stack])):
        for page_indices in (False, True):
            assert kvops.transfer_kv_all_layer_mla(*caches, index, index, page_indices=page_indices) is None
    other = torch.zeros(0, 6, 4, 8, device="meta")
    with pytest.raises(RuntimeError, match=r"dst\[1\] has 24 tokens, expected 20 as dst\[0\]"):
        kvops.transfer_kv_all_layer_mla([], [stack, other])


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", CACHES)
def test_destination_that_requires_grad(op):
    """Each destination in turn, by the public function in eager and in a graph, and by the operator in a graph."""
    names = list(paged_call(op, *SIZES[0]).named_caches())
    for name in names if op in MOVES else names[1::2]:
        for run in (
            getattr(kvops, op),
            torch.compile(getattr(kvops, op), backend="aot_eager", fullgraph=True),
            torch.compile(getattr(torch.ops.kvops, op), backend="aot_eager", fullgraph=True),
        ):
            call = paged_call(op, *SIZES[0])
            call.named_caches()[name].requires_grad_()
            with pytest.raises(RuntimeError) as error:
                run(*call.args)
            assert f"kvops.{op}: {name} {NO_GRADIENT}" in str(error.value)


@pytest.mark.parametrize(
    ("functions", "backend"),
    [(torch.ops.kvops, "aot_eager"), (kvops, "aot_eager"), (kvops, "inductor")],
    ids=["operator", "public", "public-inductor"],
)
@pytest.mark.parametrize("op", ["transfer_kv_per_layer", ALL_MLA])
def test_source_that_requires_grad(op, functions, backend):
    """It traces, the bytes arrive, and the gradients are those of a program without the transfer."""

    def step(sources, dst, index):
        rows = [source * 2 for source in sources]
        pools = [[pool] for pool in (*rows, *dst)] if takes_lists(op) else [*rows, *dst]
        paired = pools if is_mla(op) else [pools[0], pools[2], pools[1], pools[3]]
        getattr(functions, op)(*paired, index, index)
        return sum(row.sum() for row in rows)

    shape = (6, 8) if is_mla(op) else (6, 2, 8)
    number = 1 if is_mla(op) else 2
    sources = [torch.randn(shape, requires_grad=True) for _ in range(number)]
    dst = [torch.zeros(shape) for _ in range(number)]
    index = torch.tensor([4, 1])
    torch.compile(step, backend=backend, fullgraph=True)(sources, dst, index).backward()
    for source, pool in zip(sources, dst, strict=True):
        assert torch.equal(source.grad, torch.full(shape, 2.0))
        assert torch.equal(pool[index], 2 * source[index])
        assert pool.count_nonzero() == 2 * pool[0].numel()


# ---- engines by name, enum and number, in a graph -------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("engine", ["auto", kvops.Engine.AUTO, 0], ids=repr)
def test_engine_spellings_in_a_graph(engine, backend):
    """In the graph's own code and as an argument of the compiled function."""
    call = paged_call(MLA, *SIZES[0])
    inside = torch.compile(
        lambda *args: kvops.transfer_kv_per_layer_mla(*args, engine=engine), backend=backend, fullgraph=True
    )
    check(call, run=lambda call: inside(*call.args))
    call = paged_call(MLA, *SIZES[0])
    outside = torch.compile(kvops.transfer_kv_per_layer_mla, backend=backend, fullgraph=True)
    check(call, run=lambda call: outside(*call.args, engine=engine))


@pytest.mark.parametrize(
    ("engine", "number"), [("sm", "1 (sm)"), (kvops.Engine.COPY, "2 (copy)"), (3, "3 (staged)")], ids=repr
)
def test_every_spelling_reaches_the_operator(engine, number):
    """Which the CPU shows by refusing it."""
    call = paged_call(MLA, *SIZES[0])
    step = torch.compile(kvops.transfer_kv_per_layer_mla, backend="aot_eager", fullgraph=True)
    for run in (kvops.transfer_kv_per_layer_mla, step):
        with pytest.raises(RuntimeError) as error:
            run(*call.args, engine=engine)
        assert f"kvops.{MLA}: engine is {number}, expected 0 (auto)" in str(error.value)
