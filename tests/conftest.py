"""Where the tests run: always on the CPU, and in every placement that the machine's GPUs allow.

A test that takes `way` (source, destination and index memory, engine) or `pool_way` (the same for a move within one
pool) runs once for each. Without CUDA all GPU ways are one skipped test that says why.
"""

import hypothesis
import pytest
from cases import CPU_WAY, cuda_pools, cuda_ways
from cuda_cases import cuda_test

import kvops

hypothesis.settings.register_profile("kvops", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kvops")


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not kvops.cuda_available():
        pytest.skip(kvops.cuda_available().reason)


def with_cuda(cuda_params):
    """CPU_WAY, then the GPU's, marked as such; one marked None where there is no GPU."""
    gpu = cuda_params() if kvops.cuda_available() else [None]
    return [CPU_WAY] + [pytest.param(way, id=str(way or "cuda"), marks=cuda_test) for way in gpu]


@pytest.fixture(params=with_cuda(cuda_ways), ids=str)
def way(request):
    return request.param


@pytest.fixture(params=with_cuda(cuda_pools), ids=str)
def pool_way(request):
    return request.param
