"""The schemas are the promise to torch.compile: what is written is annotated, nothing else is, nothing is returned."""

import pytest
import torch
from cases import CACHES, CPU_WAY, MOVES, caches_for
from torch._subclasses.fake_tensor import FakeTensorMode

OPTIONS = "*, bool page_indices=False, int engine=0, int num_sms=0"
SCHEMAS = {
    "transfer_kv_per_layer": "Tensor src_k, Tensor(a!) dst_k, Tensor src_v, Tensor(b!) dst_v, "
    "Tensor? src_indices, Tensor? dst_indices",
    "transfer_kv_per_layer_mla": "Tensor src, Tensor(a!) dst, Tensor? src_indices, Tensor? dst_indices",
    "transfer_kv_all_layer": "Tensor[] src_k, Tensor(a!)[] dst_k, Tensor[] src_v, Tensor(b!)[] dst_v, "
    "Tensor? src_indices, Tensor? dst_indices",
    "transfer_kv_all_layer_mla": "Tensor[] src, Tensor(a!)[] dst, Tensor? src_indices, Tensor? dst_indices",
    "move_kv": "Tensor(a!)[] k, Tensor(b!)[] v, Tensor src_indices, Tensor dst_indices",
    "move_kv_mla": "Tensor(a!)[] caches, Tensor src_indices, Tensor dst_indices",
}


def test_every_registered_operator_is_listed_here():
    registered = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("kvops::")}
    assert registered == {f"kvops::{op}" for op in SCHEMAS}
    assert set(CACHES) == set(SCHEMAS), "tests/cases.py makes calls of every operator"


@pytest.mark.parametrize("op", SCHEMAS)
def test_schema(op):
    packet = getattr(torch.ops.kvops, op)
    assert packet.overloads() == ["default"], "an overload called `out` would drop the old content"
    assert str(packet.default._schema) == f"kvops::{op}({SCHEMAS[op]}, {OPTIONS}) -> ()"


@pytest.mark.parametrize("op", SCHEMAS)
def test_annotated_is_what_is_written(op):
    written = {name for name in CACHES[op] if op in MOVES or name.startswith("dst")}
    arguments = getattr(torch.ops.kvops, op).default._schema.arguments
    assert {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write} == written
    assert {a.name for a in arguments if a.alias_info is not None} == written, "nothing else is aliased"


@pytest.mark.parametrize("op", SCHEMAS)
def test_has_no_autograd_and_no_tag(op):
    """A transfer records no gradient. A tag such as flexible_layout would change the strides that it is given."""
    overload = getattr(torch.ops.kvops, op).default
    for key in ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"kvops::{op}", key), key
    assert not {torch.Tag.flexible_layout, torch.Tag.pointwise} & set(overload.tags)
    assert not any(str(tag).endswith(".out") for tag in overload.tags)


@pytest.mark.parametrize("form", ["list", "stack"])
@pytest.mark.parametrize("op", SCHEMAS)
def test_fake_returns_nothing(op, form):
    with FakeTensorMode():
        call = CPU_WAY.call(op, caches_for(op, CPU_WAY, form), [0, 1], [2, 3])
        assert getattr(torch.ops.kvops, op)(*call.args) is None


@pytest.mark.parametrize("op", SCHEMAS)
def test_meta_tensors(op):
    """Shapes can be tried out without memory."""
    call = CPU_WAY.call(op, caches_for(op, CPU_WAY), [0, 1], [2, 3])
    args = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), call.args)
    assert getattr(torch.ops.kvops, op)(*args) is None
