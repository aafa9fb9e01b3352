"""python -m kvops replay: traces and their errors, the tiers against a model in lists, and no wrong byte passes."""

import json
import random
import subprocess
import sys

import pytest
import torch

import kvops
from kvops.__main__ import main
from kvops.replay.models import MODELS, Block, Model
from kvops.replay.pattern import Pattern, compare
from kvops.replay.pool import LAYOUTS, POISON
from kvops.replay.replayer import Replayer
from kvops.replay.tiers import TwoTierCache
from kvops.replay.trace import Request, generate_trace, read_trace

# Pools of 64 and 128 blocks of Llama-3-8B: small enough for a generated trace to overflow both at once.
TINY = ["replay", "--device", "cpu", "--requests", "150", "--device-pool", "2MiB", "--host-pool", "4MiB"]
GOOD = {"timestamp": 7, "input_length": 600, "output_length": 3, "hash_ids": [0, 5]}


@pytest.fixture(autouse=True)
def _torch_threads():
    """The command sets their number for the process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def replay(*arguments, tmp_path):
    """Exit code and the JSON result."""
    path = tmp_path / "result.json"
    code = main([*TINY, "--json", str(path), *arguments])
    return code, json.loads(path.read_text())


def write_trace(path, *prompts):
    lines = [json.dumps(GOOD | {"input_length": 512 * len(prompt), "hash_ids": list(prompt)}) for prompt in prompts]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


# Traces


def test_a_trace_is_read_up_to_the_limit(tmp_path):
    path = tmp_path / "trace.jsonl"
    first, second = GOOD | {"user": "of no concern"}, GOOD | {"timestamp": 8}
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\nbad\n")
    assert read_trace(path, limit=2) == [Request(7, 600, 3, [0, 5]), Request(8, 600, 3, [0, 5])]


def test_generated_requests_have_the_form_of_a_trace(tmp_path):
    trace = generate_trace(300, seed=1)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(vars(request)) + "\n" for request in trace))
    assert read_trace(path) == trace
    assert generate_trace(300, seed=1) == trace != generate_trace(300, seed=2)
    parents = {}
    for request in trace:
        for before, block in zip([None, *request.hash_ids], request.hash_ids, strict=False):
            assert parents.setdefault(block, before) == before, "a block must have one prefix"
    blocks = sum(len(request.hash_ids) for request in trace)
    assert 0.3 < 1 - len(parents) / blocks < 0.9, "some of it must be reused"


BAD_LINES = {
    "not json": ("{nope", "not JSON: Expecting property name enclosed in double quotes at column 2"),
    "not utf-8": (b'{"timestamp": "\xff"}', "not JSON: 'utf-8' codec can't decode"),
    "empty": ("", "not JSON: Expecting value"),
    "nested": ("[" * 100_000, "not JSON: "),
    "list": ([1], "expected a JSON object, found [1]"),
    "missing": ({name: GOOD[name] for name in GOOD if name != "output_length"}, "no field output_length"),
    "string": (GOOD | {"input_length": "600"}, 'input_length is "600", expected a whole number'),
    "bool": (GOOD | {"output_length": True}, "output_length is true, expected a whole number"),
    "negative": (GOOD | {"input_length": -1}, "input_length is -1, expected 0 or more"),
    "ids no list": (GOOD | {"hash_ids": 5}, "hash_ids is 5, expected a list"),
    "id no int": (GOOD | {"hash_ids": [0, 1.5]}, "hash_ids[1] is 1.5, expected 0 <= id < 2**63"),
    "id negative": (GOOD | {"hash_ids": [-3, 0]}, "hash_ids[0] is -3, expected 0 <= id < 2**63"),
    "id large": (GOOD | {"hash_ids": [0, 1 << 63]}, "hash_ids[1] is 9223372036854775808, expected 0 <= id < 2**63"),
    "no ids": (GOOD | {"hash_ids": []}, "hash_ids holds 0 ids, expected 2: one per 512 tokens of the input_length 600"),
    "id twice": (GOOD | {"hash_ids": [4, 4]}, "hash_ids holds an id twice"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named(tmp_path, capsys, line, message):
    path = tmp_path / "trace.jsonl"
    if not isinstance(line, (str, bytes)):
        line = json.dumps(line)
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + (line.encode() if isinstance(line, str) else line) + b"\n")
    assert main(["replay", str(path)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"{path}:2: {message}")
    assert err.count("\n") == 1
    assert out == ""


def test_a_file_that_holds_no_trace_is_named(tmp_path, capsys):
    (tmp_path / "empty").touch()
    for name, message in (("none", "No such file or directory"), ("", "Is a directory"), ("empty", "no request in it")):
        assert main(["replay", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err == f"{tmp_path / name}: {message}\n"


BAD_OPTIONS = {
    "--scale 3": "--scale 3 does not divide the 512 tokens of a block",
    "--page-size 3": "--page-size 3 does not divide a block of 4 tokens (--scale 128)",
    "--layers 33": "--layers 33: Llama-3-8B has 32",
    "--layers 0": "'0' is not a whole number above 0",
    "--device-pool 1KiB": "--device-pool holds no block: one takes 32 KiB",
    "--host-pool 1MB": "'1MB' is not a size such as 512MiB or 1.5GiB",
    "--engine sm": "--engine sm needs --device cuda",
    "--seed -1": "'-1' is not a whole number below 2**63",
    "--seed 9223372036854775808": "'9223372036854775808' is not a whole number below 2**63",
    "--json /no/such/folder/x.json": "--json /no/such/folder/x.json: expected a file in a folder that exists",
}


@pytest.mark.parametrize(("option", "message"), BAD_OPTIONS.items())
def test_a_bad_option_is_refused(capsys, option, message):
    with pytest.raises(SystemExit, match="2"):
        main(["replay", "--device", "cpu", *option.split()])
    assert message in capsys.readouterr().err


# The two tiers


class Lists:
    """What TwoTierCache must decide, as lists of blocks, the most recently used first."""

    def __init__(self, device_slots, host_slots):
        self.device_slots, self.host_slots = device_slots, host_slots
        self.device, self.host = [], []

    def request(self, prompt):
        """Device hits, host hits and computed blocks."""
        length = next((n for n, block in enumerate(prompt) if block not in self.device + self.host), len(prompt))
        hits = [block for block in prompt[:length] if block in self.device]
        restored = [block for block in prompt[:length] if block in self.host]
        others = [block for block in self.device if block not in prompt]
        kept = self.device_slots - len(prompt)
        host = others[kept:] + [block for block in self.host if block not in prompt]
        self.device = prompt + others[:kept]
        self.host = host[: self.host_slots - len(restored)]  # those to restore stay until the offload is done
        return hits, restored, prompt[length:]


def chats(rng, n):
    """Prompts with common prefixes, and now and then one whose blocks are cached behind a gap."""
    known = [[0]]
    for number in range(n):
        prompt = rng.choice(known)[: rng.randint(1, 9)] + [10 * number + i + 1 for i in range(rng.randint(0, 4))]
        known.append(prompt)
        yield [1_000_000 + number, *prompt[1:]] if rng.random() < 0.1 else prompt


@pytest.mark.parametrize(("device_slots", "host_slots"), [(13, 20), (13, 5), (13, 0), (40, 3000)])
def test_the_tiers_agree_with_a_model_in_lists(device_slots, host_slots):
    cache, lists = TwoTierCache(device_slots, host_slots), Lists(device_slots, host_slots)
    device, host = {}, {}  # slot -> block: what the plans make of the memory
    seen = {"offloads": 0, "restores": 0, "hits": 0, "evictions": 0}
    for prompt in chats(random.Random(device_slots + host_slots), 600):
        before = set(lists.device + lists.host)
        hits, restored, computed = lists.request(prompt)
        plan = cache.request(prompt)
        assert [block for block, _ in plan.hits] == hits
        assert [move.block for move in plan.restores] == restored
        assert [block for block, _ in plan.computes] == computed
        assert plan.evictions == len(before.union(prompt)) - len(set(lists.device + lists.host))

        for slot in plan.freed_on_host:
            del host[slot]
        for block, source, target in plan.offloads:
            assert device[source] == block
            assert target not in host
            host[target] = block
        for slot in plan.freed_on_device:
            del device[slot]
        for block, source, target in plan.restores:
            assert target not in device
            assert host[source] == block
            device[target] = host.pop(source)
        for block, slot in plan.computes:
            assert slot not in device
            device[slot] = block
        assert all(device[slot] == block for block, slot in plan.hits)

        for memory, tier, blocks in ((device, cache.device, lists.device), (host, cache.host, lists.host)):
            assert list(tier.blocks) == blocks[::-1]
            assert {block: slot for slot, block in memory.items()} == tier.blocks
            assert sorted([*tier.free, *memory]) == list(range(tier.slots))
        for name in seen:
            seen[name] += plan.evictions if name == "evictions" else len(getattr(plan, name))
    assert seen["hits"]
    assert bool(seen["offloads"]) == bool(seen["restores"]) == (host_slots > 0)
    assert bool(seen["evictions"]) == (host_slots < 3000)


# The pattern

SMALL = Block(Model(layers=3, row=(2, 8), parts=("K", "V")), layers=3, tokens=4, page_size=2)
BLOCKS = [7, 9]


def test_every_row_has_bytes_of_its_own():
    rows = Pattern(SMALL, 0, "cpu")([0, 1, 2, 1 << 62, (1 << 63) - 1]).flatten(0, -2)
    assert len(set(rows.flatten().tolist())) == rows.numel() == 5 * SMALL.rows * 4
    other_seed = Pattern(SMALL, 1, "cpu")(BLOCKS)
    assert (other_seed != Pattern(SMALL, 0, "cpu")(BLOCKS)).all()


# Index of a row: part, layer, page, slot. Two pages a block: page 1 is of block 7, page 2 of block 9.
SWAPS = {
    "K and V": ((0, 1, 1, 0), (1, 1, 1, 0), (7, 1, 2, "K")),
    "layers": ((1, 0, 1, 1), (1, 2, 1, 1), (7, 0, 3, "V")),
    "slots of a page": ((0, 1, 2, 0), (0, 1, 2, 1), (9, 1, 0, "K")),
    "pages of a block": ((1, 1, 2, 1), (1, 1, 3, 1), (9, 1, 1, "V")),
    "blocks": ((0, 2, 0, 0), (0, 2, 2, 0), (7, 2, 0, "K")),
}


@pytest.mark.parametrize(("one", "other", "first"), SWAPS.values(), ids=SWAPS)
def test_swapped_rows_are_named(one, other, first):
    expected = Pattern(SMALL, 0, "cpu")(BLOCKS)
    found = expected.clone()
    assert compare(SMALL, BLOCKS, found, expected) == (0, None)
    found[one], found[other] = expected[other], expected[one]
    rows, mismatch = compare(SMALL, BLOCKS, found, expected)
    assert rows == 2
    assert mismatch[:4] == first


def test_one_wrong_byte_is_named():
    expected = Pattern(SMALL, 0, "cpu")(BLOCKS)
    found = expected.clone()
    row = found[1, 2, 3, 0].view(torch.uint8)  # V of layer 2, block 9, token 2
    right = int(row[21])
    row[21] ^= 0xFF
    rows, mismatch = compare(SMALL, BLOCKS, found, expected)
    assert (rows, tuple(mismatch)) == (1, (9, 2, 2, "V", 21, right ^ 0xFF, right))
    text = f"block 9, layer 2, token 2, V, byte 21: {right ^ 0xFF:#04x}, expected {right:#04x}"
    assert str(mismatch) == text


# The command


def test_the_default_replay_finds_no_mismatch(capsys):
    assert main(["replay", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "requests   1500 in" in out
    assert "Llama-3-8B, 2 of its 32 layers" in out
    assert ", 0 mismatches\n" in out
    assert err == "", "a progress bar is for terminals"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_bytes_come_back(tmp_path, model, layout):
    code, result = replay("--model", model, "--host-layout", layout, "--layers", "3", tmp_path=tmp_path)
    assert (code, result["mismatches"], result["first_mismatch"]) == (0, 0, None)
    assert min(result[name] for name in ("device_hits", "host_hits", "computed", "evicted")) > 0
    assert result["looked_up"] == result["device_hits"] + result["host_hits"] + result["computed"]
    assert result["restored"]["bytes"] == result["host_hits"] * result["block"]["bytes"]
    assert result["offloaded"]["bytes"] > result["restored"]["bytes"]
    rows = result["block"]["bytes"] // MODELS[model].row_bytes
    assert result["rows_verified"] > rows * (result["device_hits"] + result["host_hits"])


SHAPES = {
    "long pages": "--scale 8 --page-size 64 --device-pool 16MiB --host-pool 16MiB",
    "pages of one token": "--scale 512 --device-pool 1MiB --host-pool 1MiB",
    "whole model, two threads": "--layers 32 --threads 2 --device-pool 16MiB --host-pool 16MiB --requests 20",
}


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_other_shapes(tmp_path, options):
    code, result = replay(*options.split(), tmp_path=tmp_path)
    assert (code, result["mismatches"]) == (0, 0)
    assert result["restored"]["calls"] > 0


def test_without_a_host_pool_nothing_moves(tmp_path):
    code, result = replay("--host-pool", "0", tmp_path=tmp_path)
    assert (code, result["mismatches"]) == (0, 0)
    assert (result["host_hits"], result["restored"]["calls"], result["offloaded"]["calls"]) == (0, 0, 0)
    assert result["device_hits"] > 0
    assert result["evicted"] > 0


def test_a_request_makes_one_call_each_way(tmp_path, monkeypatch):
    calls = []

    def record(source_k, target_k, source_v, target_v, source_pages, target_pages, **options):
        assert options == {"page_indices": True, "engine": "auto"}
        assert source_pages.dtype == target_pages.dtype == torch.int64
        calls.append((source_k.shape[1], len(source_pages)))
        real(source_k, target_k, source_v, target_v, source_pages, target_pages, **options)

    real = kvops.transfer_kv_all_layer
    monkeypatch.setattr(kvops, "transfer_kv_all_layer", record)
    # The device holds 4 blocks (8 pages), the host 8 (16 pages): two prompts, and the first again.
    trace = write_trace(tmp_path / "trace.jsonl", [1, 2, 3], [4, 5, 6], [1, 2, 3, 7])
    code, _ = replay(trace, "--device-pool", "128KiB", "--host-pool", "256KiB", tmp_path=tmp_path)
    assert code == 0
    # Block 1, the start of the prefix, is still there: the ends of prefixes go first.
    assert calls == [(8, 4), (8, 6), (16, 4)]


def test_a_prompt_too_large_is_cut_and_counted(tmp_path, capsys):
    trace = write_trace(tmp_path / "trace.jsonl", range(6), [0, 1], range(5))
    code, result = replay(trace, "--device-pool", "128KiB", tmp_path=tmp_path)
    assert (code, result["too_large"], result["blocks_cut"]) == (0, 2, 3)
    assert (result["looked_up"], result["device_hits"], result["computed"]) == (10, 6, 4)
    assert "too large  2 prompts for the device pool, 3 blocks cut from their ends" in capsys.readouterr().out


def test_transfers_write_to_poison(monkeypatch):
    """Or else one that moves nothing could find the right bytes in a page that held them before."""
    real = kvops.transfer_kv_all_layer

    def check(*arguments, **options):
        pages = arguments[-1]
        for target in (arguments[1], arguments[3]):
            assert (target[:, pages].view(torch.int64) == POISON).all()
        real(*arguments, **options)

    monkeypatch.setattr(kvops, "transfer_kv_all_layer", check)
    replayer = Replayer(SMALL, device_slots=4, host_slots=3)
    for prompt in ([1, 2, 3, 4], [5, 6, 7], [1, 2], [8, 3], [5], [9, 2], [1], [3]):  # [8, 3]: 3 is behind a gap
        replayer.request(prompt)
    replayer.verify_all()
    assert (replayer.restored.calls, replayer.offloaded.calls, replayer.count.mismatches) == (4, 7, 0)


def drop_a_row(target, before):
    target[-1, -1].copy_(before[-1, -1])


def swap_layers(target, _):
    target[:2] = target[:2].flip(0)


def forget_a_page(target, before):
    target.copy_(before)


@pytest.mark.parametrize("model", ["Llama-3-8B", "DeepSeek-V3"])
@pytest.mark.parametrize("damage", [drop_a_row, swap_layers, forget_a_page])
@pytest.mark.parametrize("direction", ["offload", "restore"])
def test_a_broken_transfer_is_reported(tmp_path, monkeypatch, capsys, model, damage, direction):
    """From the third call of a direction on, the last page of the last cache comes out wrong."""
    name = "transfer_kv_all_layer" + ("" if model == "Llama-3-8B" else "_mla")
    real, calls = getattr(kvops, name), {"offload": 0, "restore": 0}

    def broken(*arguments, **options):
        *caches, _, pages = arguments
        source, target, page = caches[0], caches[-1], int(pages[-1])
        before = target[:, page].clone()
        real(*arguments, **options)
        this = "offload" if source.shape[1] < target.shape[1] else "restore"  # the host has more pages
        calls[this] += 1
        if this == direction and calls[this] >= 3:
            damage(target[:, page], before)

    monkeypatch.setattr(kvops, name, broken)
    code, result = replay("--model", model, tmp_path=tmp_path)
    mismatch = result["first_mismatch"]
    assert code == 1
    assert result["mismatches"] > 0
    layer, token = {drop_a_row: (1, 3), swap_layers: (0, 2), forget_a_page: (0, 2)}[damage]
    part = MODELS[model].parts[-1]
    assert (mismatch["layer"], mismatch["token"], mismatch["part"]) == (layer, token, part)
    where = f"first mismatch: block {mismatch['block']}, layer {layer}, token {token}, {part}, byte 0: "
    assert where in capsys.readouterr().err


def test_the_module_runs_as_a_command(tmp_path):
    command = [sys.executable, "-m", "kvops", *TINY, "--requests", "3", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)  # the installed package
    assert (done.returncode, done.stderr) == (0, "")
    assert "requests   3 in" in done.stdout


@pytest.mark.cuda
@pytest.mark.parametrize("model", ["Llama-3-8B", "DeepSeek-V3"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", ["auto cpu", "auto device", "sm cpu", "sm device", "copy cpu", "staged cpu"])
def test_all_bytes_come_back_from_the_gpu(tmp_path, model, layout, how):
    engine, indices = how.split()
    options = ["--device", "cuda", "--engine", engine, "--indices", indices, "--layers", "3", "--scale", "128"]
    code, result = replay("--model", model, "--host-layout", layout, *options, tmp_path=tmp_path)
    assert (code, result["mismatches"]) == (0, 0)
    assert result["host_hits"] > 0
