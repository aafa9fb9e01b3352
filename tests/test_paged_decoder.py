"""The decoder example: its tokens are right, the transfers are in its graphs, and no graph clones a pool."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kvops

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import paged_decoder as example

LAYERS, PROMPT, NEW_TOKENS = 2, 45, 24
PAGE_BYTES = 4 * example.PAGE_SIZE * example.KV_HEADS * example.HEAD_DIM


@pytest.fixture(autouse=True)
def fresh_compiler():
    """All backends share one limit of compilations a function: no test may leave its own to the next."""
    torch.compiler.reset()


def run_main(backend: str, device: str = "cpu") -> int:
    sizes = ["--layers", str(LAYERS), "--prompt", str(PROMPT), "--new-tokens", str(NEW_TOKENS)]
    return example.main([*sizes, "--backend", backend, "--device", device])


def model_and_prompt(device: str) -> tuple[example.Decoder, torch.Tensor]:
    model = example.Decoder(LAYERS).requires_grad_(False).to(device)
    return model, torch.randint(example.VOCAB, (PROMPT,)).to(device)


def planes_allocated(device: str, function: Callable[[], object], trace: Path) -> int:
    """How much memory `function` allocates, in units of one layer's K pool. Smaller allocations do not count."""
    plane_bytes = PAGE_BYTES * example.DEVICE_PAGES
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) // plane_bytes
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    # The profiler's own list of events nets what a compiled graph allocates against what it frees; the trace does not.
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    return sum(size for size in sizes if size >= plane_bytes) // plane_bytes


# On the GPU the pool is so large that a math library's workspace is nothing beside it.
@pytest.mark.parametrize(("device", "pages"), [("cpu", 1024), pytest.param("cuda", 65536, marks=pytest.mark.cuda)])
def test_inductor_matches_and_clones_no_pool(monkeypatch, tmp_path, device, pages):
    monkeypatch.setattr(example, "DEVICE_PAGES", pages)
    assert run_main("inductor", device) == 0
    # The second run finds the graphs compiled, and allocates its pools: nothing else may be as large.
    model, prompt = model_and_prompt(device)

    def generate():
        example.generate_paged(model, prompt, NEW_TOKENS)

    device_planes = 2 * LAYERS
    host_planes = device_planes * example.HOST_PAGES // pages if device == "cpu" else 0
    assert planes_allocated(device, generate, tmp_path / "trace.json") == device_planes + host_planes


def test_a_stack_written_by_index_copy_is_cloned(monkeypatch, tmp_path):
    """What DevicePool's docstring warns of. It also shows that the measurement sees a clone."""

    def write(k, k_pool, v, v_pool, _, slots):
        k_pool.flatten(0, 1).index_copy_(0, slots, k)
        v_pool.flatten(0, 1).index_copy_(0, slots, v)

    monkeypatch.setattr(kvops, "transfer_kv_per_layer", write)
    model, prompt = model_and_prompt("cpu")
    row = (example.KV_HEADS, example.HEAD_DIM)
    pool = example.DevicePool(*torch.zeros(2, LAYERS, example.DEVICE_PAGES, example.PAGE_SIZE, *row).unbind())
    host = example.HostPool(*torch.zeros(2, example.HOST_PAGES, example.PAGE_SIZE, LAYERS, *row).unbind())
    pages, position = torch.arange(9), torch.tensor([PROMPT])
    compiled = torch.compile(example.step, fullgraph=True)

    def decode_and_offload():
        offload = example.PageMap(pages, pages)
        compiled(model, prompt[:1], position, position, pages, pool, host, offload=offload)

    decode_and_offload()
    assert planes_allocated("cpu", decode_and_offload, tmp_path / "trace.json") >= LAYERS


def test_each_step_is_one_graph_that_holds_its_transfers():
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        graphs.append([name for node in graph.graph.nodes if (name := transfer_or_attention(node))])
        return graph.forward

    def transfer_or_attention(node: torch.fx.Node) -> str | None:
        target = str(node.target)
        if "scaled_dot_product_attention" in target:
            return "attend"
        if "kvops.transfer_kv_per_layer" in target:
            return "load" if node.kwargs.get("page_indices") else "write"
        return "store all" if "kvops.transfer_kv_all_layer" in target else None

    model, prompt = model_and_prompt("cpu")
    paged = example.generate_paged(model, prompt, NEW_TOKENS, backend)
    assert paged == example.generate_reference(model, prompt, NEW_TOKENS)
    decode = ["write", "attend"] * LAYERS
    assert graphs == [decode, decode, [*decode, "store all"], ["load", "write", "attend"] * LAYERS]


def load_nothing(*caches_and_indices, page_indices=False):
    if not page_indices:
        torch.ops.kvops.transfer_kv_per_layer(*caches_and_indices)


def load_reversed(*caches_and_indices, page_indices=False):
    *caches, src_indices, dst_indices = caches_and_indices
    src_indices = src_indices.flip(0) if page_indices else src_indices
    torch.ops.kvops.transfer_kv_per_layer(*caches, src_indices, dst_indices, page_indices=page_indices)


def store_nothing(*caches_and_indices, page_indices):
    pass


@pytest.mark.parametrize("broken", [load_nothing, load_reversed, store_nothing])
def test_tokens_differ_where_a_transfer_goes_wrong(monkeypatch, capsys, broken):
    name = "transfer_kv_all_layer" if broken is store_nothing else "transfer_kv_per_layer"
    monkeypatch.setattr(kvops, name, broken)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # it has no part in this
    assert run_main("eager") == 1
    assert "THE TOKENS DIFFER" in capsys.readouterr().out
