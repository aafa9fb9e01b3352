"""Tensors whose memory is not what their shape says, or changes during a transfer: refused or handled, no crash."""

import pytest
import torch

import kvops


def test_indices_inside_the_destination_are_refused():
    """Checked once and then overwritten, they would send later rows anywhere."""
    pool = torch.zeros(600, 600, dtype=torch.int64)
    indices = pool[0].copy_(torch.arange(600))
    before = pool.clone()
    with pytest.raises(
        RuntimeError, match="src_indices and dst share memory, expected indices that the transfer does not"
    ):
        kvops.transfer_kv_per_layer_mla(torch.full((600, 600), 1 << 40), pool, indices, None)
    with pytest.raises(RuntimeError, match="dst_indices and caches share memory"):
        kvops.move_kv_mla([pool], torch.arange(600).flip(0), indices)
    assert torch.equal(pool, before)


def test_indices_in_a_part_that_no_row_reaches():
    storage = torch.zeros(5, 8, dtype=torch.int64)
    kvops.transfer_kv_per_layer_mla(torch.ones(2, 8, dtype=torch.int64), storage[1:], None, storage[0, :2])
    assert storage.sum() == 8


def test_copy_on_write_destination_gets_its_own_bytes():
    shared = torch.zeros(4, 4)
    pool = torch._lazy_clone(shared)
    kvops.transfer_kv_per_layer_mla(torch.ones(4, 4), pool, torch.tensor([0]), torch.tensor([1]))
    assert (shared.sum(), pool.sum()) == (0, 4)
    moved = torch._lazy_clone(pool)
    kvops.move_kv_mla([moved], torch.tensor([1]), torch.tensor([2]))
    assert (pool.sum(), moved.sum()) == (4, 8)


def test_copy_on_write_source_stays_shared():
    source = torch._lazy_clone(torch.ones(4, 4))
    pool = torch.zeros(4, 4)
    kvops.transfer_kv_per_layer_mla(source, pool)
    assert torch._C._is_cow_tensor(source)
    assert pool.sum() == 16


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32])
def test_quantized_tensors_are_refused(dtype):
    tensors = [torch.quantize_per_tensor(torch.ones(4, 4), scale, 0, dtype) for scale in (0.1, 0.5)]
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(RuntimeError, match=f"src has dtype {name}, expected one that is not quantized"):
        kvops.transfer_kv_per_layer_mla(*tensors)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_packed_quantized_tensors_are_refused():
    scales, zeros = torch.ones(8), torch.zeros(8)
    tensors = [torch.quantize_per_channel(torch.ones(8, 8), scales, zeros, 0, torch.quint4x2) for _ in range(2)]
    with pytest.raises(RuntimeError, match="src has dtype quint4x2, expected one that is not quantized"):
        kvops.transfer_kv_per_layer_mla(*tensors)


@pytest.mark.parametrize("name", ["src", "dst", "src_indices", "dst_indices"])
@pytest.mark.parametrize("bytes_left", [0, 8])
def test_storage_that_was_freed_or_shrunk(name, bytes_left):
    arguments = {
        "src": torch.zeros(4, 4),
        "dst": torch.zeros(4, 4),
        "src_indices": torch.tensor([3, 1]),
        "dst_indices": torch.tensor([0, 2]),
    }
    arguments[name].untyped_storage().resize_(bytes_left)
    with pytest.raises(RuntimeError, match=rf"{name} reaches beyond its storage of {bytes_left} bytes"):
        kvops.transfer_kv_per_layer_mla(**arguments)


def test_an_index_repeated_without_end_is_looked_at_once():
    endless = torch.tensor([0]).expand(2**50)
    kvops.transfer_kv_per_layer_mla(torch.zeros(4, 0), torch.zeros(4, 0), endless, endless)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_none_is_named_by_kernel_and_fake(device):
    cache = torch.zeros(4, 4, device=device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(RuntimeError, match="move_kv_mla: src_indices is None, expected a tensor"):
        torch.ops.kvops.move_kv_mla([cache], None, index)
    with pytest.raises(RuntimeError, match="transfer_kv_per_layer_mla: src is None, expected a tensor"):
        torch.ops.kvops.transfer_kv_per_layer_mla(None, cache, None, None)
