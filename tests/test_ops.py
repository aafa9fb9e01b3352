"""What the public functions add to the operators: one stack in place of a list, engines by name, plain refusals."""

import pytest
import torch

import kvops


def pools():
    return torch.arange(2 * 4 * 3, dtype=torch.float32).view(2, 4, 1, 3), torch.zeros(2, 4, 1, 3)


@pytest.mark.parametrize("engine", ["auto", 0, kvops.Engine.AUTO])
def test_one_stack_stands_for_its_layers(engine):
    src, dst = pools()
    kvops.transfer_kv_all_layer_mla(src, dst, torch.tensor([3]), torch.tensor([1]), engine=engine)
    assert torch.equal(dst[:, 1], src[:, 3])
    assert dst.count_nonzero() == 6


def test_one_layer_is_not_taken_for_a_stack():
    """A layer-first pool without pages looks like one paged layer: copied as such, most of it would stay behind."""
    src, dst = torch.ones(2, 4, 3), torch.zeros(2, 4, 3)
    with pytest.raises(RuntimeError, match=r"transfer_kv_all_layer_mla: src has 3 dimensions, expected 4 \[layers, "):
        kvops.transfer_kv_all_layer_mla(src, dst)
    with pytest.raises(RuntimeError, match=r"move_kv: k has 4 dimensions, expected 5 \[layers, "):
        kvops.move_kv(torch.ones(2, 4, 3, 8), [], torch.tensor([0]), torch.tensor([1]))
    assert dst.count_nonzero() == 0


def test_an_iterator_of_layers_is_a_list_of_layers():
    src, dst = pools()
    kvops.transfer_kv_all_layer_mla(iter(src), iter(dst))
    assert torch.equal(dst, src)


def test_an_unknown_engine_names_the_known_ones():
    src, dst = pools()
    with pytest.raises(ValueError, match="engine is 'dma', expected one of 'auto', 'sm', 'copy', 'staged'"):
        kvops.transfer_kv_all_layer_mla(src, dst, engine="dma")


def test_none_in_place_of_indices_is_named():
    pool, _ = pools()
    with pytest.raises(RuntimeError, match=r"kvops.move_kv_mla: src_indices is None, expected a tensor"):
        kvops.move_kv_mla(pool, None, torch.tensor([1]))


def test_new_dtypes_have_their_names():
    src = torch.zeros(4, 4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(RuntimeError, match="dst has dtype float8_e8m0fnu, expected float32 as src"):
        kvops.transfer_kv_per_layer_mla(torch.zeros(4, 4), src)
