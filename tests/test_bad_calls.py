"""A bad call names the argument, what was found and what was expected; it moves nothing, and the next good call works.

One table of calls that differ from a good one in a single argument. The same words come from the kernel, from the
public function and from the fake that torch.compile asks at trace time; a few faults only one of them can see.
"""

import re
from dataclasses import dataclass
from typing import Any

import expecttest
import pytest
import torch
from cases import CACHES, CPU_WAY, TRANSFERS, caches_for, is_mla, takes_lists
from reference import Snapshot, check
from torch._subclasses.fake_tensor import FakeTensorMode

import kvops

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

EVERYWHERE = ("operator", "public function", "fake")
RUN_TIME = ("operator", "public function")  # values and addresses, which a fake does not have
ONLY_FAKE = ("fake",)  # devices that this machine need not have
NOT_IN_KERNEL = ("public function", "fake")  # what the stable ABI cannot ask


@dataclass
class BadCall:
    op: str
    text: str
    change: Any  # {argument: its bad value, or a function that makes it}, or a function that makes all of it
    where: tuple = EVERYWHERE

    def arguments(self) -> dict:
        change = self.change() if callable(self.change) else self.change
        changed = {name: value() if callable(value) else value for name, value in change.items()}
        return {**good_arguments(self.op), **changed}

    @property
    def message(self) -> str:
        return f"kvops.{self.op}: {self.text}"


def kv(*shape, **kwargs):
    return torch.randn(shape or (16, 8, 64), **{"dtype": torch.bfloat16, **kwargs})


def latent(*shape, **kwargs):
    return kv(*(shape or (16, 576)), **kwargs)


def index(*values, **kwargs):
    return torch.tensor(values, **kwargs)


def good_arguments(op) -> dict:
    make = latent if is_mla(op) else kv
    caches = {name: [make(), make()] if takes_lists(op) else make() for name in CACHES[op]}
    return {**caches, "src_indices": index(0, 1, 2), "dst_indices": index(3, 4, 5)}


def one_tensor(op, *names):
    """The same memory as two arguments."""

    def change():
        pool = latent() if is_mla(op) else kv()
        return {name: [pool, *good_arguments(op)[name][1:]] if takes_lists(op) else pool for name in names}

    return change


def parts_of(make, tokens, **parts):
    """Arguments that are parts of one pool."""

    def change():
        pool = make(tokens, 8, 64)
        return {name: pool[part] for name, part in parts.items()}

    return change


LAYER, LAYER_MLA, ALL, ALL_MLA = TRANSFERS
KV_FORMS = "3 [tokens, heads, head_dim] or 4 [pages, page_size, heads, head_dim]"
KV_LIST_FORMS = (
    "3 [tokens, heads, head_dim], 4 [pages, page_size, heads, head_dim] "
    "or 5 [layers, pages, page_size, heads, head_dim]"
)
MLA_FORMS = "2 [tokens, dim] or 3 [pages, page_size, dim]"
MLA_LIST_FORMS = "2 [tokens, dim], 3 [pages, page_size, dim] or 4 [layers, pages, page_size, dim]"
BAD_ENGINE = "expected 0 (auto), 1 (sm), 2 (copy) or 3 (staged)"
IN_HOST_MEMORY = "expected 0 (auto): source and destination are both in host memory"
STAGED_ON_GPU = (
    "engine is 3 (staged), expected 0 (auto), 1 (sm) or 2 (copy): neither source nor destination is in host memory"
)
NO_GRADIENT = "requires grad, expected one that does not: a transfer writes in place and records no gradient"
ONE_MOVES = "share memory, expected planes that share no byte: use move_kv to move rows within one pool"
ONE_MOVES_MLA = ONE_MOVES.replace("move_kv", "move_kv_mla")
DESTINATIONS = "share memory, expected destinations that share no byte"
WHOLE_PAGES = "since page_indices moves whole pages"


def on_cuda(op, device="cuda:0"):
    make = latent if is_mla(op) else kv
    return {name: lambda: [make(device=device)] if takes_lists(op) else make(device=device) for name in CACHES[op]}


BAD_CALLS = [
    # options
    *(BadCall(op, f"engine is 7, {BAD_ENGINE}", {"engine": 7}) for op in CACHES),
    BadCall(LAYER, f"engine is -1, {BAD_ENGINE}", {"engine": -1}),
    *(BadCall(op, "num_sms is -1, expected 0 (automatic) or more", {"num_sms": -1}) for op in CACHES),
    BadCall(LAYER, f"engine is 4, {BAD_ENGINE}", {"engine": 4, "num_sms": -1}),
    # layout
    BadCall(LAYER, "src_k has layout sparse_coo, expected strided", {"src_k": lambda: kv().to_sparse()}),
    BadCall(LAYER, "dst_v has layout sparse_coo, expected strided", {"dst_v": lambda: kv().to_sparse()}),
    BadCall(LAYER_MLA, "dst has layout sparse_csr, expected strided", {"dst": lambda: latent().to_sparse_csr()}),
    BadCall(ALL, "src_v[1] has layout sparse_coo, expected strided", {"src_v": lambda: [kv(), kv().to_sparse()]}),
    BadCall("move_kv", "k[0] has layout sparse_coo, expected strided", {"k": lambda: [kv().to_sparse(), kv()]}),
    # device
    BadCall(LAYER, "src_k is on xpu:0, expected cpu or cuda", {"src_k": lambda: kv(device="xpu:0")}, ONLY_FAKE),
    BadCall(ALL_MLA, "dst[1] is on xpu:0, expected cpu or cuda",
            {"dst": lambda: [latent(), latent(device="xpu:0")]}, ONLY_FAKE),
    # dimensions
    BadCall(LAYER, f"src_k has 2 dimensions, expected {KV_FORMS}", {"src_k": lambda: kv(16, 512)}),
    BadCall(LAYER, f"dst_v has 5 dimensions, expected {KV_FORMS}", {"dst_v": lambda: kv(1, 4, 4, 8, 64)}),
    BadCall(LAYER_MLA, f"src has 1 dimensions, expected {MLA_FORMS}", {"src": lambda: latent(576)}),
    BadCall(LAYER_MLA, f"dst has 4 dimensions, expected {MLA_FORMS}", {"dst": lambda: latent(1, 4, 4, 576)}),
    BadCall(ALL, f"src_k[1] has 2 dimensions, expected {KV_LIST_FORMS}", {"src_k": lambda: [kv(), kv(16, 512)]}),
    BadCall(ALL, f"dst_k[0] has 6 dimensions, expected {KV_LIST_FORMS}", {"dst_k": lambda: [kv(1, 2, 4, 4, 8, 64)]}),
    BadCall(ALL_MLA, f"src[0] has 0 dimensions, expected {MLA_LIST_FORMS}", {"src": lambda: [torch.randn(())]}),
    BadCall(ALL_MLA, f"dst[1] has 5 dimensions, expected {MLA_LIST_FORMS}",
            {"dst": lambda: [latent(), latent(1, 1, 4, 4, 576)]}),
    BadCall("move_kv", f"v[1] has 1 dimensions, expected {KV_LIST_FORMS}", {"v": lambda: [kv(), kv(16)]}),
    BadCall("move_kv_mla", f"caches[0] has 1 dimensions, expected {MLA_LIST_FORMS}", {"caches": lambda: [latent(576)]}),
    # the last dimension
    BadCall(LAYER, "src_k has stride 2 in its last dimension, expected 1", {"src_k": lambda: kv(16, 8, 128)[..., ::2]}),
    BadCall(LAYER, "dst_k has stride 8 in its last dimension, expected 1",
            {"dst_k": lambda: kv(16, 64, 8).transpose(1, 2)}),
    BadCall(LAYER_MLA, "src has stride 0 in its last dimension, expected 1",
            {"src": lambda: latent(16, 1).expand(16, 576)}),
    BadCall(ALL, "dst_v[1] has stride 2 in its last dimension, expected 1",
            {"dst_v": lambda: [kv(), kv(16, 8, 128)[..., ::2]]}),
    BadCall("move_kv_mla", "caches[1] has stride 3 in its last dimension, expected 1",
            {"caches": lambda: [latent(), latent(16, 1728)[:, ::3]]}),
    # one device and one page size a side
    BadCall(LAYER, "src_v is on cuda:1, expected cuda:0 as src_k",
            {"src_k": lambda: kv(device="cuda:0"), "src_v": lambda: kv(device="cuda:1")}, ONLY_FAKE),
    BadCall(LAYER, "dst_v is on cuda:0, expected cpu as dst_k", {"dst_v": lambda: kv(device="cuda:0")}, ONLY_FAKE),
    BadCall(ALL, "src_k[1] is on cuda:0, expected cpu as src_k[0]",
            {"src_k": lambda: [kv(), kv(device="cuda:0")]}, ONLY_FAKE),
    BadCall("move_kv", "v[0] is on cpu, expected cuda:0 as k[0]",
            {"k": lambda: [kv(device="cuda:0"), kv(device="cuda:0")]}, ONLY_FAKE),
    BadCall(LAYER, "src_v has page_size 1, expected 4 as src_k", {"src_k": lambda: kv(4, 4, 8, 64)}),
    BadCall(LAYER, "dst_v has page_size 16, expected 1 as dst_k", {"dst_v": lambda: kv(1, 16, 8, 64)}),
    BadCall(ALL, "src_v[0] has page_size 8, expected 1 as src_k[0]", {"src_v": lambda: [kv(2, 2, 8, 8, 64)]}),
    BadCall(ALL_MLA, "dst[1] has page_size 2, expected 1 as dst[0]", {"dst": lambda: [latent(), latent(8, 2, 576)]}),
    BadCall("move_kv", "k[1] has page_size 4, expected 1 as k[0]", {"k": lambda: [kv(), kv(4, 4, 8, 64)]}),
    BadCall("move_kv", "v[0] has page_size 4, expected 1 as k[0]", {"v": lambda: [kv(4, 4, 8, 64)] * 2}),
    # layers
    BadCall(ALL, "dst_k has 31 layers in all, expected 2 as src_k", {"dst_k": lambda: [kv(31, 16, 1, 8, 64)]}),
    BadCall(ALL, "src_v has 1 layers in all, expected 2 as src_k", {"src_v": lambda: [kv()]}),
    BadCall(ALL, "dst_v has 0 layers in all, expected 2 as src_k", {"dst_v": list}),
    BadCall(ALL, "dst_k has 2 layers in all, expected 0 as src_k", {"src_k": list}),
    BadCall(ALL_MLA, "dst has 5 layers in all, expected 2 as src", {"dst": lambda: [latent(4, 16, 1, 576), latent()]}),
    BadCall("move_kv", "v has 3 layers in all, expected 2 as k", {"v": lambda: [kv(3, 16, 1, 8, 64)]}),
    # pairs
    BadCall(LAYER, "dst_k has dtype float16, expected bfloat16 as src_k", {"dst_k": lambda: kv(dtype=torch.float16)}),
    BadCall(LAYER, "dst_v has dtype bfloat16, expected float32 as src_v", {"src_v": lambda: kv(dtype=torch.float32)}),
    BadCall(LAYER_MLA, "dst has dtype uint8, expected float8_e4m3fn as src",
            {"src": lambda: torch.zeros(16, 576, dtype=torch.float8_e4m3fn),
             "dst": lambda: torch.zeros(16, 576, dtype=torch.uint8)}),
    BadCall(ALL, "dst_k[1] has dtype int8, expected bfloat16 as src_k[1]",
            {"dst_k": lambda: [kv(), torch.zeros(16, 8, 64, dtype=torch.int8)]}),
    BadCall(LAYER, "dst_k has 4 heads of 128, expected 8 heads of 64 as src_k", {"dst_k": lambda: kv(16, 4, 128)}),
    BadCall(LAYER, "dst_v has 8 heads of 64, expected 8 heads of 63 as src_v", {"src_v": lambda: kv(16, 8, 63)}),
    BadCall(ALL, "dst_v[0] has 1 heads of 64, expected 8 heads of 64 as src_v[0]",
            {"dst_v": lambda: [kv(2, 16, 1, 1, 64)]}),
    BadCall(LAYER_MLA, "dst has dim 512, expected 576 as src", {"dst": lambda: latent(16, 512)}),
    BadCall(ALL_MLA, "dst[1] has dim 576, expected 132 as src[1]", {"src": lambda: [latent(), latent(16, 132)]}),
    # whole pages
    BadCall(LAYER, f"dst_k has page_size 1, expected 4 as src_k, {WHOLE_PAGES}",
            {"src_k": lambda: kv(4, 4, 8, 64), "src_v": lambda: kv(4, 4, 8, 64), "page_indices": True}),
    BadCall(LAYER_MLA, f"dst has page_size 2, expected 1 as src, {WHOLE_PAGES}",
            {"dst": lambda: latent(8, 2, 576), "page_indices": True}),
    BadCall(ALL_MLA, f"dst[0] has page_size 16, expected 1 as src[0], {WHOLE_PAGES}",
            {"dst": lambda: [latent(2, 3, 16, 576)], "page_indices": True}),
    # indices
    BadCall(LAYER, "src_indices has layout sparse_coo, expected strided",
            {"src_indices": lambda: index(1, 2, 3).to_sparse()}),
    BadCall(LAYER, "dst_indices is on xpu:0, expected cpu or cuda",
            {"dst_indices": lambda: index(1, 2, 3, device="xpu:0")}, ONLY_FAKE),
    BadCall(LAYER, "src_indices has dtype int16, expected int32 or int64",
            {"src_indices": lambda: index(0, 1, 2, dtype=torch.int16)}),
    BadCall(ALL_MLA, "dst_indices has dtype float32, expected int32 or int64",
            {"dst_indices": lambda: index(0.0, 1.0, 2.0)}),
    BadCall("move_kv", "src_indices has dtype bool, expected int32 or int64",
            {"src_indices": lambda: index(True, False)}),
    BadCall(LAYER, "src_indices has 2 dimensions, expected 1", {"src_indices": lambda: index(0, 1, 2)[None]}),
    BadCall("move_kv_mla", "dst_indices has 0 dimensions, expected 1", {"dst_indices": lambda: torch.tensor(4)}),
    *(BadCall(op, "dst_indices has 2 elements, expected 3 as src_indices", {"dst_indices": lambda: index(3, 4)})
      for op in CACHES),
    BadCall(LAYER, "dst_indices has 3 elements, expected 0 as src_indices",
            {"src_indices": lambda: torch.zeros(0, dtype=torch.int64)}),
    # one side without indices
    BadCall(LAYER, "src_k has 2 tokens, expected at least 3, the length of dst_indices",
            {"src_k": lambda: kv(2, 8, 64), "src_indices": None}),
    BadCall(LAYER, "dst_v has 2 tokens, expected at least 3, the length of src_indices",
            {"dst_v": lambda: kv(2, 8, 64), "dst_indices": None}),
    BadCall(ALL, "src_v[1] has 2 tokens, expected at least 3, the length of dst_indices",
            {"src_v": lambda: [kv(), kv(2, 8, 64)], "src_indices": None}),
    BadCall(ALL_MLA, "dst[0] has 2 pages, expected at least 3, the length of src_indices",
            {"src": lambda: [latent(2, 16, 1, 576)], "dst": lambda: [latent(2, 2, 1, 576)], "dst_indices": None,
             "page_indices": True}),
    # neither side with indices
    BadCall(LAYER, "dst_k has 8 tokens, expected 16 as src_k",
            {"dst_k": lambda: kv(8, 8, 64), "src_indices": None, "dst_indices": None}),
    BadCall(LAYER, "src_v has 17 tokens, expected 16 as src_k",
            {"src_v": lambda: kv(17, 8, 64), "src_indices": None, "dst_indices": None}),
    BadCall(ALL_MLA, "src[1] has 15 tokens, expected 16 as src[0]",
            {"src": lambda: [latent(), latent(15, 576)], "src_indices": None, "dst_indices": None}),
    BadCall(LAYER_MLA, "dst has 3 pages, expected 4 as src",
            {"src": lambda: latent(4, 4, 576), "dst": lambda: latent(3, 4, 576),
             "src_indices": None, "dst_indices": None, "page_indices": True}),
    # engine and place
    *(BadCall(op, f"engine is 1 (sm), {IN_HOST_MEMORY}", {"engine": 1}) for op in CACHES),
    BadCall(LAYER, f"engine is 2 (copy), {IN_HOST_MEMORY}", {"engine": 2}),
    BadCall(ALL_MLA, f"engine is 3 (staged), {IN_HOST_MEMORY}", {"engine": 3}),
    *(BadCall(op, STAGED_ON_GPU, {**on_cuda(op), "engine": 3}, ONLY_FAKE) for op in CACHES),
    # gradients
    BadCall(LAYER, f"dst_k {NO_GRADIENT}", {"dst_k": lambda: kv(requires_grad=True)}, NOT_IN_KERNEL),
    BadCall(LAYER_MLA, f"dst {NO_GRADIENT}", {"dst": lambda: latent(requires_grad=True)}, NOT_IN_KERNEL),
    BadCall(ALL, f"dst_v[1] {NO_GRADIENT}", {"dst_v": lambda: [kv(), kv(requires_grad=True)]}, NOT_IN_KERNEL),
    BadCall("move_kv", f"k[0] {NO_GRADIENT}", {"k": lambda: [kv(requires_grad=True), kv()]}, NOT_IN_KERNEL),
    BadCall("move_kv_mla", f"caches[1] {NO_GRADIENT}",
            {"caches": lambda: [latent(), latent(requires_grad=True)]}, NOT_IN_KERNEL),
    # meta and real tensors in one call: dispatch leads to the fake
    BadCall(LAYER_MLA, "src is on meta, expected all tensors on meta or none", {"src": lambda: latent(device="meta")}),
    BadCall(LAYER_MLA, "dst is on meta, expected all tensors on meta or none", {"dst": lambda: latent(device="meta")}),
    BadCall(ALL, "dst_indices is on meta, expected all tensors on meta or none",
            {"dst_indices": lambda: torch.zeros(3, dtype=torch.int64, device="meta")}),
    # index values
    BadCall(LAYER, "src_indices[2] is 16, expected 0 <= index < 16, the tokens of src_k",
            {"src_indices": lambda: index(0, 15, 16)}, RUN_TIME),
    BadCall(LAYER, "dst_indices[0] is -1, expected 0 <= index < 16, the tokens of dst_k",
            {"dst_indices": lambda: index(-1, 15, 99)}, RUN_TIME),
    BadCall(LAYER, "src_indices[1] is 12, expected 0 <= index < 12, the tokens of src_v",
            {"src_v": lambda: kv(12, 8, 64), "src_indices": lambda: index(0, 12, 11, dtype=torch.int32)}, RUN_TIME),
    BadCall(LAYER, "dst_indices[1] is -2147483648, expected 0 <= index < 16, the tokens of dst_k",
            {"dst_indices": lambda: index(0, -(1 << 31), 1, dtype=torch.int32)}, RUN_TIME),
    BadCall(LAYER_MLA, "src_indices[2] is 4294967296, expected 0 <= index < 16, the tokens of src",
            {"src_indices": lambda: index(0, 1, 1 << 32)}, RUN_TIME),
    BadCall(LAYER_MLA, "dst_indices[0] is 4, expected 0 <= index < 4, the pages of dst",
            {"src": lambda: latent(4, 4, 576), "dst": lambda: latent(4, 4, 576),
             "dst_indices": lambda: index(4, 1, 2), "page_indices": True}, RUN_TIME),
    BadCall(ALL, "dst_indices[1] is 12, expected 0 <= index < 12, the tokens of dst_v[1]",
            {"dst_v": lambda: [kv(), kv(12, 8, 64)], "dst_indices": lambda: index(3, 12, 4)}, RUN_TIME),
    BadCall(ALL_MLA, "src_indices[2] is 99, expected 0 <= index < 16, the tokens of src[0]",
            {"src_indices": lambda: index(0, 0, 1, 0, 99, 0)[::2], "dst_indices": None}, RUN_TIME),
    BadCall("move_kv", "src_indices[0] is 16, expected 0 <= index < 16, the tokens of k[0]",
            {"src_indices": lambda: index(16, 0, 1)}, RUN_TIME),
    BadCall("move_kv_mla", "dst_indices[2] is 8, expected 0 <= index < 8, the tokens of caches[1]",
            {"caches": lambda: [latent(), latent(8, 576)], "dst_indices": lambda: index(0, 1, 8)}, RUN_TIME),
    # memory that overlaps
    BadCall(LAYER, f"src_k and dst_k {ONE_MOVES}", one_tensor(LAYER, "src_k", "dst_k"), RUN_TIME),
    BadCall(LAYER, f"src_v and dst_k {ONE_MOVES}", one_tensor(LAYER, "src_v", "dst_k"), RUN_TIME),
    BadCall(LAYER, f"src_k and dst_k {ONE_MOVES}", parts_of(kv, 24, src_k=slice(0, 16), dst_k=slice(15, 24)), RUN_TIME),
    BadCall(LAYER_MLA, f"src and dst {ONE_MOVES_MLA}", one_tensor(LAYER_MLA, "src", "dst"), RUN_TIME),
    BadCall(ALL, f"src_k and dst_k {ONE_MOVES}", one_tensor(ALL, "src_k", "dst_k"), RUN_TIME),
    BadCall(LAYER, "dst_k overlaps itself, expected every element at its own address",
            {"dst_k": lambda: kv(1, 8, 64).expand(16, 8, 64)}, RUN_TIME),
    BadCall(LAYER_MLA, "dst overlaps itself, expected every element at its own address",
            {"dst": lambda: latent(2000).as_strided((16, 576), (64, 1))}, RUN_TIME),
    BadCall("move_kv", "v overlaps itself, expected every element at its own address",
            {"v": lambda: [kv(2, 16, 1, 1, 64).expand(2, 16, 1, 8, 64)]}, RUN_TIME),
    BadCall(LAYER, f"dst_k and dst_v {DESTINATIONS}", one_tensor(LAYER, "dst_k", "dst_v"), RUN_TIME),
    BadCall(LAYER, f"dst_k and dst_v {DESTINATIONS}",
            parts_of(kv, 24, dst_k=slice(0, 12), dst_v=slice(11, 24)), RUN_TIME),
    BadCall("move_kv", f"k and v {DESTINATIONS}", one_tensor("move_kv", "k", "v"), RUN_TIME),
]  # fmt: skip


def ids(bad: BadCall) -> str:
    return f"{bad.op}: {bad.text[:60]}"


def seen_by(who):
    return pytest.mark.parametrize("bad", [bad for bad in BAD_CALLS if who in bad.where], ids=ids)


def in_memory(arguments: dict) -> list:
    flat = torch.utils._pytree.tree_leaves(arguments)
    return [t for t in flat if torch.is_tensor(t) and t.layout == torch.strided and not t.is_meta]


def assert_refused(functions, bad: BadCall):
    """Exactly the message; not a byte written; and a good call of the same operator works right after."""
    arguments = bad.arguments()
    tensors = [tensor.detach() for tensor in in_memory(arguments)]
    before = Snapshot(tensors)
    with pytest.raises(RuntimeError) as error:
        getattr(functions, bad.op)(**arguments)
    assert str(error.value) == bad.message
    after = Snapshot(tensors)
    assert all(torch.equal(after.storages[key], before.storages[key]) for key in before.storages)
    check(CPU_WAY.call(bad.op, caches_for(bad.op, CPU_WAY, layers=1), [0, 5], [2, 1]))


@seen_by("operator")
def test_operator_refuses(bad):
    assert_refused(torch.ops.kvops, bad)


@seen_by("public function")
def test_public_function_refuses(bad):
    assert_refused(kvops, bad)


@seen_by("fake")
def test_fake_refuses(bad):
    with FakeTensorMode():
        arguments = bad.arguments()
        with pytest.raises(RuntimeError) as error:
            getattr(torch.ops.kvops, bad.op)(**arguments)
    assert bad.message in str(error.value)


def test_the_table_is_large_and_every_good_call_is_good():
    assert len(BAD_CALLS) >= 60
    for op in CACHES:
        assert getattr(torch.ops.kvops, op)(**good_arguments(op)) is None
        with FakeTensorMode():
            assert getattr(torch.ops.kvops, op)(**good_arguments(op)) is None


def test_one_tensor_twice_in_a_list():
    """To the operator the list is one cache: it overlaps itself, or holds two destinations that share memory."""
    pool = latent()
    for call in (
        lambda: kvops.move_kv_mla([pool, pool], index(0), index(1)),
        lambda: kvops.transfer_kv_all_layer_mla([latent(), latent()], [pool, pool], index(0), index(1)),
    ):
        with pytest.raises(RuntimeError, match=f"(caches|dst) overlaps itself|{DESTINATIONS}"):
            call()


def test_wrong_engine_name():
    for engine in ("auto", kvops.Engine.AUTO, 0):
        kvops.transfer_kv_per_layer_mla(latent(), latent(), index(0), index(1), engine=engine)
    with pytest.raises(ValueError, match=r"tma.*auto.*sm.*copy.*staged"):
        kvops.transfer_kv_per_layer_mla(latent(), latent(), index(0), index(1), engine="tma")


# ---- inside a compiled graph ----------------------------------------------------------------------------------------


COMPILED = [bad for bad in BAD_CALLS if bad.op in (LAYER, "move_kv_mla") and bad.where == EVERYWHERE]


@pytest.mark.parametrize("bad", [bad for bad in COMPILED if "layout" not in bad.text], ids=ids)
def test_compile_refuses(bad):
    """At trace time, before anything runs. (Dynamo wraps the message. Sparse tensors do not get as far as the fake.)"""
    torch._dynamo.reset()
    arguments = bad.arguments()
    step = torch.compile(getattr(torch.ops.kvops, bad.op), fullgraph=True, backend="aot_eager", dynamic=False)
    tensors = in_memory(arguments)
    before = Snapshot(tensors)
    with pytest.raises(RuntimeError, match=re.escape(bad.message)):
        step(**arguments)
    after = Snapshot(tensors)
    assert all(torch.equal(after.storages[key], before.storages[key]) for key in before.storages)


def test_values_are_checked_when_a_compiled_graph_runs():
    torch._dynamo.reset()
    step = torch.compile(kvops.transfer_kv_per_layer_mla, fullgraph=True, backend="aot_eager")
    src, dst = latent(), latent()
    untouched = dst.clone()
    with pytest.raises(RuntimeError, match=r"src_indices\[1\] is 16, expected 0 <= index < 16, the tokens of src"):
        step(src, dst, index(0, 16), index(1, 2))
    assert torch.equal(dst, untouched)
    step(src, dst, index(0, 15), index(1, 2))
    assert torch.equal(dst[1:3], src[[0, 15]])


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("op", CACHES)
def test_gpu_has_no_use_for_staging(op):
    assert_refused(torch.ops.kvops, BadCall(op, STAGED_ON_GPU, {**on_cuda(op), "engine": 3}))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "bad",
    [
        BadCall(LAYER, "dst_v is on cuda:0, expected cpu as dst_k", {"dst_v": lambda: kv(device="cuda")}),
        BadCall(LAYER, "dst_k has 2 dimensions, expected " + KV_FORMS, {"dst_k": lambda: kv(16, 512, device="cuda")}),
        BadCall(ALL, "src_k[1] is on cpu, expected cuda:0 as src_k[0]", {"src_k": lambda: [kv(device="cuda"), kv()]}),
        BadCall(LAYER_MLA, "src_indices[0] is 16, expected 0 <= index < 16, the tokens of src",
                {"dst": lambda: latent(device="cuda"), "src_indices": lambda: index(16, 1, 2)}),
        BadCall(LAYER_MLA, f"src and dst {ONE_MOVES_MLA}",
                lambda: dict.fromkeys(("src", "dst"), latent(device="cuda"))),
    ],
    ids=ids,
)  # fmt: skip
def test_operator_refuses_on_cuda(bad):
    assert_refused(torch.ops.kvops, bad)


# ---- as a reader sees them ------------------------------------------------------------------------------------------


def test_messages_read_well():
    messages = []
    for change in (
        {"engine": 7},
        {"src": latent(576)},
        {"dst": latent(16, 512)},
        {"src": latent(dtype=torch.float32)},
        {"dst_indices": index(3, 4)},
        {"src_indices": index(0, 1, 17)},
        {"dst": latent(2, 576), "dst_indices": None},
    ):
        with pytest.raises(RuntimeError) as error:
            kvops.transfer_kv_per_layer_mla(**{**good_arguments(LAYER_MLA), **change})
        messages.append(str(error.value).replace("kvops.transfer_kv_per_layer_mla: ", ""))
    expecttest.assert_expected_inline(
        "\n".join(messages),
        """\
engine is 7, expected 0 (auto), 1 (sm), 2 (copy) or 3 (staged)
src has 1 dimensions, expected 2 [tokens, dim] or 3 [pages, page_size, dim]
dst has dim 512, expected 576 as src
dst has dtype bfloat16, expected float32 as src
dst_indices has 2 elements, expected 3 as src_indices
src_indices[2] is 17, expected 0 <= index < 16, the tokens of src
dst has 2 tokens, expected at least 3, the length of src_indices""",
    )
