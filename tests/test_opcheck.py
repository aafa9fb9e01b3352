"""torch.library.opcheck: schema, fake, autograd and AOT dispatch of every operator agree with what its kernel does.

It compares eager with compiled, not with the truth, which the other tests do. fp8 stays out: opcheck's own comparison
has no fp8 arithmetic, and to an operator that moves bytes fp8 is uint8. It clones its arguments, up to PyTorch 2.13
pinned ones to pageable memory, so that the warning about it is expected here.
"""

import pytest
import torch
from cases import CACHES, CPU_WAY, MOVES, TRANSFERS, Way, caches_for, is_mla, strided, takes_lists
from cuda_cases import cuda_test

# opcheck itself looks at .grad of what it cloned (seen in PyTorch 2.14).
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

WAYS = [CPU_WAY] + [
    pytest.param(way, id=str(way), marks=cuda_test)
    for way in (Way("cuda:0", "cuda:0", "cuda:0"), Way("pinned", "cuda:0", "cpu"))
]


def a_list(op, way):
    return way.call(op, caches_for(op, way), [0, 3, 1], [2, 0, 5])


def a_stack(op, way):
    return way.call(op, caches_for(op, way, form="stack", dtype=torch.float32), [0, 3, 1], [2, 0, 5])


def pages(op, way):
    return way.call(op, caches_for(op, way, src=(5, 4), dst=(7, 4)), [4, 0], [2, 4], page_indices=True)


def strides(op, way):
    """Holes, page-first stacks, and indices that are every other element of a longer list."""
    row = (6,) if is_mla(op) else (2, 8)
    lead = (5, 4) if not takes_lists(op) else (3, 5, 4)
    sides = [way.src] * len(CACHES[op]) if op in MOVES else [way.src, way.dst] * (len(CACHES[op]) // 2)
    order = list(range(len(lead) + len(row) - 1))
    order = [*order[1:], order[0]]
    caches = [strided((*lead, *row), torch.float16, side, order, [1] * len(order)) for side in sides]
    if takes_lists(op):
        caches = [[cache] for cache in caches]
    indices = [way.indices(values, dtype=torch.int32, form="every_other") for values in ([3, 7, 19], [19, 3, 0])]
    return way.call(op, caches, *indices)


def no_indices(op, way):
    return way.call(op, caches_for(op, way), [], [])


def bytes_alone(op, way):
    return way.call(op, caches_for(op, way, dtype=torch.uint8, row=(1, 3)), [1, 2], [2, 1])


def source_requires_grad(op, way):
    call = a_list(op, way)
    for tensor in (tensor for sources, _ in call.pairs() for tensor in sources):
        tensor.requires_grad_()
    return call


def indices_left_out(op, way):
    return way.call(op, caches_for(op, way), [4, 3, 2], None)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("sample", [a_list, a_stack, pages, strides, no_indices, bytes_alone])
@pytest.mark.parametrize("op", CACHES)
def test_opcheck(op, sample, way):
    opcheck(sample(op, way))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("sample", [source_requires_grad, indices_left_out])
@pytest.mark.parametrize("op", TRANSFERS)
def test_opcheck_of_transfers(op, sample, way):
    """A move has no source of its own, and needs both index lists."""
    opcheck(sample(op, way))


def opcheck(call):
    for i, tensor in enumerate(call.named_caches().values()):
        numbers = torch.arange(tensor.numel()).add(i).remainder(101)  # opcheck's comparison does not like NaN
        tensor.detach().copy_(numbers.view(tensor.shape))
    torch.library.opcheck(getattr(torch.ops.kvops, call.op).default, call.args, call.options, test_utils="ALL")
