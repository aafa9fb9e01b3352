"""The reference and the comparison, on cases worked out by hand: what every other test leans on."""

import expecttest
import pytest
import torch
from bytes_compare import assert_same_bytes, byte_view
from cases import CPU_WAY, dense, strided
from reference import POISON, Snapshot, assert_bytes, check, expected, fill, reachable, rounds, storage_bytes


def values(tensor, snapshot):
    return snapshot.bytes_of(tensor).flatten(1).tolist()


def test_transfer_by_hand():
    """Tokens 5 and 0 of pages of 3 go to tokens 1 and 2 of pages of 2, in both layers."""
    src = torch.arange(12, dtype=torch.uint8).view(2, 2, 3, 1)
    dst = torch.full((2, 2, 2, 1), 99, dtype=torch.uint8)
    call = CPU_WAY.call("transfer_kv_all_layer_mla", ([src], [dst]), [5, 0], [1, 2])
    (after,) = expected(call, Snapshot([src, dst]))
    assert values(dst, after) == [[99, 5, 0, 99], [99, 11, 6, 99]]
    assert values(src, after) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_pages_by_hand():
    src = torch.arange(6, dtype=torch.uint8).view(3, 2, 1)
    dst = torch.full((2, 2, 1), 99, dtype=torch.uint8)
    call = CPU_WAY.call("transfer_kv_per_layer_mla", (src, dst), [2], [1], page_indices=True)
    (after,) = expected(call, Snapshot([src, dst]))
    assert values(dst, after) == [[99, 99], [4, 5]]


def test_rotation_by_hand():
    pool = torch.arange(4, dtype=torch.uint8).view(4, 1)
    (after,) = expected(CPU_WAY.call("move_kv_mla", ([pool],), [0, 1, 2], [1, 2, 0]), Snapshot([pool]))
    assert values(pool, after) == [[2], [0], [1], [3]]


def test_repeated_destinations_have_every_candidate():
    assert rounds([7, 8, 9], [0, 1, 0]) == [[(7, 0), (8, 1)], [(9, 0), (8, 1)]]


@pytest.mark.parametrize(
    ("where", "named"),
    [(0, "outside of every cache tensor"), (92, r"src\[1, 3\], byte 0"), (-1, "outside of every cache tensor")],
)
def test_a_byte_that_must_not_change_is_missed_nowhere(where, named):
    """Before, within and behind the source."""
    src, dst = dense((4, 9), torch.uint8, align=16), dense((4, 9), torch.uint8)

    def run(call):
        call.run()
        storage_bytes(src)[where] += 1

    with pytest.raises(AssertionError, match=named):
        check(CPU_WAY.call("transfer_kv_per_layer_mla", (src, dst), [0, 1], [1, 2]), run)


def test_a_row_that_did_not_move_is_seen():
    src, dst = dense((4, 9), torch.uint8), dense((4, 9), torch.uint8)
    call = CPU_WAY.call("transfer_kv_per_layer_mla", (src, dst), [0, 1], [1, 2])
    fill(call)
    alternatives = expected(call, Snapshot(reachable(call).values()))
    with pytest.raises(AssertionError, match=r"dst\[1, 0\], byte 0 .* is 0xff, expected .*; 18 of"):
        assert_bytes(call, alternatives, call.op)


def test_message_of_the_comparison():
    """Strided, two bytes an element, and a NaN that equals its own bytes."""
    cache = strided((2, 3, 4), torch.bfloat16, order=(1, 0), holes=(2, 1)).fill_(float("nan"))
    storage = storage_bytes(cache)
    wrong = storage.clone()
    byte_view(cache, wrong)[1, 2, 5] = POISON - 1
    byte_view(cache, wrong)[1, 2, 7] = POISON - 1
    assert_same_bytes(storage, [wrong, storage], {"dst_k": cache}, "move_kv")
    with pytest.raises(AssertionError) as error:
        assert_same_bytes(wrong, [storage], {"dst_k": cache}, "move_kv")
    expecttest.assert_expected_inline(
        str(error.value),
        """move_kv: dst_k[1, 2, 2], byte 1 (byte 191 of its storage) is 0xfe, expected 0x7f; 2 of 264 bytes differ""",
    )
