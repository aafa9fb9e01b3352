"""A compiled graph makes every transfer, in order, on the caller's memory: none is dropped, moved or redirected.

Every function here is compiled with fullgraph=True, so that nothing falls back to eager unseen. Where results are read,
whole storages are compared with the reference.
"""

import operator

import expecttest
import pytest
import torch
from cases import CACHES, CPU_WAY, Way, caches_for, dense, kv_cache, pick
from cuda_cases import cuda_test
from reference import check
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter

import kvops

BACKENDS = ["aot_eager", "inductor"]

CUDA_WAYS = [
    pytest.param(way, id=str(way), marks=cuda_test)
    for way in (Way("pinned", "cuda:0", "cuda:0"), Way("cuda:0", "pinned", "cpu"))
]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", **kwargs):
    return torch.compile(function, backend=backend, fullgraph=True, **kwargs)


def latent(tokens=16, dim=8):
    return torch.arange(tokens * dim, dtype=torch.float32).view(tokens, dim)


# ---- the same bytes as eager ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [CPU_WAY, *CUDA_WAYS], ids=str)
@pytest.mark.parametrize("functions", [torch.ops.kvops, kvops], ids=["operator", "public"])
@pytest.mark.parametrize("form", ["list", "stack"])
@pytest.mark.parametrize("op", CACHES)
def test_aot_eager(op, form, functions, way):
    call = way.call(op, caches_for(op, way, form), pick(6, 20), pick(6, 20, seed=1))
    check(call, run=lambda call: compiled(getattr(functions, op))(*call.args, **call.options))


@pytest.mark.parametrize("way", [CPU_WAY, *CUDA_WAYS], ids=str)
@pytest.mark.parametrize("op", CACHES)
def test_inductor(op, way):
    call = way.call(op, caches_for(op, way), pick(6, 20), pick(6, 20, seed=1))
    check(call, run=lambda call: compiled(getattr(kvops, op), "inductor")(*call.args, **call.options))


@pytest.mark.parametrize("layout", ["page_first", "page_head", "vllm_hnd", "page_unified"])
def test_inductor_with_strides(layout):
    """Views made outside of the graph keep their strides: a copy of one would be a transfer into the copy."""
    src, dst = (kv_cache(layout, "cpu", layers=1, pages=5, page_size=4, heads=4, head_dim=8) for _ in range(2))
    call = CPU_WAY.call("transfer_kv_all_layer", (src.k, dst.k, src.v, dst.v), pick(6, 20), pick(6, 20, seed=1))
    check(call, run=lambda call: compiled(kvops.transfer_kv_all_layer, "inductor")(*call.args))


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_made_in_the_graph(backend):
    """Layers of a stacked pool taken inside: mutation reaches the pool, not a copy of a layer."""
    src, dst = (dense((3, 5, 4, 2, 8)) for _ in range(2))
    indices = [CPU_WAY.indices(pick(6, 20, seed=seed)) for seed in (0, 1)]

    def by_layers(src, dst, src_indices, dst_indices):
        for layer in range(3):
            kvops.transfer_kv_per_layer(src[layer], dst[layer], src[layer], dst[layer + 3], src_indices, dst_indices)

    dst = dense((6, 5, 4, 2, 8))
    call = CPU_WAY.call("transfer_kv_all_layer", ([src], [dst[:3]], [src], [dst[3:]]), *indices)
    check(call, run=lambda _: compiled(by_layers, backend)(src, dst, *indices))


# ---- never dropped, never reordered ---------------------------------------------------------------------------------


@pytest.mark.parametrize("functions", [torch.ops.kvops, kvops], ids=["operator", "public"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_when_nobody_reads_the_result(backend, functions):
    """The graph returns something else, and the destination is no input that it reads."""
    src, dst, index = latent(), torch.zeros(16, 8), torch.arange(4)

    def step(x):
        functions.transfer_kv_per_layer_mla(src, dst, index, None)
        return x * 2

    assert torch.equal(compiled(step, backend)(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(dst[:4], latent()[:4])
    assert not dst[4:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_transfers_into_one_pool_keep_their_order(backend):
    pool = torch.zeros(16, 8)
    one, two = torch.full((16, 8), 1.0), torch.full((16, 8), 2.0)
    first, second = torch.arange(0, 8), torch.arange(4, 12)

    def step(pool, one, two, first, second):
        kvops.transfer_kv_per_layer_mla(one, pool, first, first)
        kvops.transfer_kv_per_layer_mla(two, pool, second, second)

    compiled(step, backend)(pool, one, two, first, second)
    assert pool[:, 0].tolist() == [1.0] * 4 + [2.0] * 8 + [0.0] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_reads_before_and_after_see_old_and_new(backend):
    pool, host, index = torch.zeros(16, 8), latent(), torch.arange(16)

    def step(pool, host, index):
        before = pool.sum(dim=1)
        kvops.transfer_kv_per_layer_mla(host, pool, index, index)
        between = pool.sum(dim=1)
        pool.mul_(2)
        kvops.transfer_kv_per_layer_mla(pool, host, index[:8], index[8:])
        return before, between, host.sum(dim=1)

    rows = latent().sum(dim=1)
    before, between, after = compiled(step, backend)(pool, host, index)
    assert not before.any()
    assert torch.equal(between, rows)
    assert torch.equal(after, torch.cat([rows[:8], 2 * rows[:8]]))
    assert torch.equal(pool, 2 * latent())


@pytest.mark.parametrize("backend", BACKENDS)
def test_offload_overwrite_restore(backend):
    """The classic way of a cache: out to the host, its place taken by others, and back."""
    device_pool, host_pool = latent(), torch.zeros(32, 8)
    slots, host_slots = torch.tensor([3, 1, 4, 15]), torch.tensor([9, 26, 5, 30])

    def step(device_pool, host_pool, slots, host_slots):
        kvops.transfer_kv_per_layer_mla(device_pool, host_pool, slots, host_slots)
        device_pool.zero_()
        kvops.transfer_kv_per_layer_mla(host_pool, device_pool, host_slots, slots)
        return device_pool + 0

    expected = torch.zeros(16, 8)
    expected[slots] = latent()[slots]
    assert torch.equal(compiled(step, backend)(device_pool, host_pool, slots, host_slots), expected)
    assert torch.equal(device_pool, expected)
    assert torch.equal(host_pool[host_slots], latent()[slots])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_move_reads_and_writes_one_pool(backend):
    pool, index = latent(), torch.arange(16)

    def step(pool, index):
        kvops.move_kv_mla([pool], index, index.flip(0))
        return pool[0] + 1

    assert torch.equal(compiled(step, backend)(pool, index), latent()[15] + 1)
    assert torch.equal(pool, latent().flip(0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_indices_and_sources_computed_in_the_graph(backend):
    pool = torch.zeros(16, 8)

    def step(pool, x, slots):
        rows = torch.relu(x) + 1
        kvops.transfer_kv_per_layer_mla(rows, pool, None, slots * 2)
        return rows

    x, slots = torch.randn(5, 8), torch.tensor([7, 0, 3, 1, 2])
    rows = compiled(step, backend)(pool, x, slots)
    assert torch.equal(pool[slots * 2], rows)
    assert pool.count_nonzero() == rows.count_nonzero()


class Decoder(torch.nn.Module):
    """Pools as buffers, as a serving engine holds them."""

    def __init__(self):
        super().__init__()
        for name in ("device_k", "device_v", "host_k", "host_v"):
            self.register_buffer(name, torch.zeros(2, 16, 1, 8))

    def forward(self, x, slots, host_slots):
        kvops.transfer_kv_all_layer(
            self.host_k.unsqueeze(2), self.device_k.unsqueeze(2), self.host_v.unsqueeze(2), self.device_v.unsqueeze(2),
            host_slots, slots,
        )  # fmt: skip
        attended = x + self.device_k[0, slots, 0] * self.device_v[1, slots, 0]
        kvops.move_kv_mla([self.device_k[1, :, 0]], slots, slots.flip(0))
        return attended


@pytest.mark.parametrize("backend", BACKENDS)
def test_pools_as_module_buffers(backend):
    x, slots, host_slots = torch.randn(3, 8), torch.tensor([1, 9, 4]), torch.tensor([0, 5, 2])
    results = []
    for mode in ("eager", backend):
        decoder = Decoder()
        for seed, pool in enumerate(decoder.buffers()):
            pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(seed)))
        run = decoder if mode == "eager" else compiled(decoder, backend)
        results.append((run(x, slots, host_slots), *decoder.buffers()))
    for eager, from_graph in zip(*results, strict=True):
        torch.testing.assert_close(from_graph, eager, rtol=0, atol=1e-6)


# ---- any number of indices ------------------------------------------------------------------------------------------


def counts_of_indices(mark, **kwargs):
    """How many graphs 5, 6, 7, 0, 1 and 2 indices take."""
    counter = CompileCounter()
    step = compiled(kvops.transfer_kv_per_layer_mla, counter, **kwargs)
    for count in (5, 6, 7, 0, 1, 2):
        src, dst = latent(), torch.zeros(16, 8)
        indices = torch.tensor(pick(count, 16, seed=count), dtype=torch.int64)
        mark(indices)
        step(src, dst, indices, indices)
        expected = torch.zeros(16, 8)
        expected[indices] = src[indices]
        assert torch.equal(dst, expected), f"{count} indices"
    return counter.frame_count


def test_number_of_indices_changes_from_call_to_call():
    """A fixed size first, then a dynamic one; torch.compile specializes 0 and 1."""
    assert counts_of_indices(mark=lambda indices: None) <= 4


def test_number_of_indices_dynamic_from_the_start():
    assert counts_of_indices(mark=lambda indices: None, dynamic=True) <= 3


def test_number_of_indices_unbacked():
    """One graph for all of them, 0 and 1 as well: no fake asks for the value of a size."""
    assert counts_of_indices(mark=lambda indices: torch._dynamo.decorators.mark_unbacked(indices, 0)) == 1


def test_number_of_indices_from_data():
    """nonzero gives as many as the data says: an unbacked size inside the graph."""
    src, pool = latent(), torch.zeros(16, 8)

    def step(src, pool, wanted):
        slots = wanted.nonzero().squeeze(1)
        kvops.transfer_kv_per_layer_mla(src, pool, slots, slots)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        step = compiled(step)
        for wanted in (torch.arange(16) % 3 == 0, torch.arange(16) == 5, torch.zeros(16, dtype=torch.bool)):
            pool.zero_()
            step(src, pool, wanted)
            assert torch.equal(pool, src * wanted[:, None])


# ---- what the graph says --------------------------------------------------------------------------------------------


def described(graph: torch.fx.Graph, inputs: dict) -> str:
    """One numbered line a call: its target, and of kvops operators what they are given and what pools they write. What
    line 3 wrote is called (3) from then on. `inputs` are names by shape: names and order of the graph's own inputs
    differ between PyTorch versions."""
    names, lines = {}, []

    def name(value):
        return "[" + ", ".join(map(name, value)) + "]" if isinstance(value, (list, tuple)) else names[value]

    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = inputs[tuple(node.meta["val"].shape)]
        elif node.op == "call_function" and node.target is operator.getitem:
            names[node] = names[node.args[0]]
        elif node.op == "call_function":
            names[node] = f"({len(lines) + 1})"
            line = str(node.target)
            if "auto_functionalized" in line:
                given = {key: value for key, value in node.kwargs.items() if isinstance(value, torch.fx.Node)}
                given = ", ".join(f"{key}={name(value)}" for key, value in given.items())
                line = f"{node.args[0]} of {given} into {name(node.kwargs['_all_bases'])}"
            lines.append(f"{names[node]} {line}")
    return "\n".join(lines)


def test_graph_of_a_small_model():
    """Both transfers and the move stand in the graph. Each is given what the one before it wrote, so that no pass may
    swap or drop them."""

    def step(host, pool, x, slots):
        kvops.transfer_kv_per_layer_mla(host, pool, slots, slots)
        y = x + pool[slots]
        kvops.move_kv_mla([pool], slots, slots.flip(0))
        kvops.transfer_kv_per_layer_mla(pool, host, slots, slots)
        return y

    def backend(graph_module, example_inputs):
        inputs = {(32, 8): "host", (16, 8): "pool", (3, 8): "x", (3,): "slots"}
        seen.append(described(graph_module.graph, inputs))
        return graph_module

    seen = []
    arguments = latent(tokens=32), torch.zeros(16, 8), torch.randn(3, 8), torch.tensor([4, 0, 9])
    compiled(step, aot_autograd(fw_compiler=backend))(*arguments)
    expecttest.assert_expected_inline(
        "\n".join(seen),
        """\
(1) kvops.transfer_kv_per_layer_mla.default of src=host, src_indices=slots, dst_indices=slots into [pool]
(2) aten.index.Tensor
(3) aten.add.Tensor
(4) aten.flip.default
(5) kvops.move_kv_mla.default of src_indices=slots, dst_indices=(4) into [(1)]
(6) kvops.transfer_kv_per_layer_mla.default of src=(5), src_indices=slots, dst_indices=slots into [host]""",
    )
