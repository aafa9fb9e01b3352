"""The ways and marks that the CUDA tests share."""

import pytest
import torch
from cases import MOVES, Call, Way, caches_for, cuda_pools, cuda_ways, pick

DELAY = 200_000_000  # GPU clock cycles, about a tenth of a second: a stream is busy for as long
cuda_test = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore:.*pageable")]

WAYS = [way for way in cuda_ways() if "cuda:0" in (way.src, way.dst) and "cuda:1" not in (way.src, way.dst)]
PINNED_WAYS = [way for way in WAYS if "cpu" not in (way.src, way.dst)]
SM_WAYS = [way for way in PINNED_WAYS if way.engine in (0, 1)]  # with indices on the GPU
POOLS = [way for way in cuda_pools() if way.src == "cuda:0"]
SM_POOLS = [way for way in POOLS if way.engine in (0, 1)]

every_way = pytest.mark.parametrize("way", WAYS, ids=str)
every_pinned_way = pytest.mark.parametrize("way", PINNED_WAYS, ids=str)
every_sm_way = pytest.mark.parametrize("way", SM_WAYS, ids=str)
every_pool = pytest.mark.parametrize("way", POOLS, ids=str)
every_sm_pool = pytest.mark.parametrize("way", SM_POOLS, ids=str)
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def simple_call(way: Way, op: str = "transfer_kv_all_layer", count: int = 11) -> Call:
    """Three layers of 20 tokens, for a transfer to 21."""
    return way.call(op, caches_for(op, way), pick(count, 20, seed=1), pick(count, 20 if op in MOVES else 21, seed=2))
