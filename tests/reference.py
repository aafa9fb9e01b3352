"""What a call must leave in memory, computed from the meaning of the operators, and the check against it.

A transfer copies the row of every source index to the place of its destination index, in every layer. A move gathers
all rows before it scatters them. Nothing else changes: not a byte between the rows, beside the tensors, in the source,
in the indices. So a check poisons whole storages, makes the call, and compares whole storages.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from bytes_compare import assert_same_bytes, byte_view
from cases import Call, is_mla

# NaN in every float dtype that has it. Sources never hold it, so that a byte that was not copied is always seen.
POISON = 0xFF


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def storage_key(tensor: torch.Tensor) -> tuple:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


class Snapshot:
    """Copies in host memory of the storages behind some tensors."""

    def __init__(self, tensors):
        self.storages = {storage_key(tensor): storage_bytes(tensor).cpu().clone() for tensor in tensors}

    def clone(self) -> Snapshot:
        copy = Snapshot([])
        copy.storages = {key: storage.clone() for key, storage in self.storages.items()}
        return copy

    def bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return byte_view(tensor, self.storages[storage_key(tensor)])


def planes(cache: torch.Tensor, values: torch.Tensor, mla: bool) -> list:
    """One [pages, page_size, ...row] of `values` for each layer; `values` has the shape of `cache` up to the last
    dimension."""
    row_dims = 1 if mla else 2
    if cache.dim() == row_dims + 1:
        return [values.unsqueeze(1)]  # tokens
    if cache.dim() == row_dims + 2:
        return [values]  # pages
    return list(values.unbind())  # a stack of layers


def page_size(cache: torch.Tensor, mla: bool) -> int:
    row_dims = 1 if mla else 2
    return 1 if cache.dim() == row_dims + 1 else cache.shape[-row_dims - 1]


def capacity(cache: torch.Tensor, mla: bool, pages: bool) -> int:
    """Units of a cache: tokens, or pages."""
    row_dims = 1 if mla else 2
    if cache.dim() == row_dims + 1:
        return cache.shape[0]
    return cache.shape[-row_dims - 2] * (1 if pages else cache.shape[-row_dims - 1])


def units(call: Call) -> tuple:
    """The source and destination index lists of a call, whole."""
    pages = call.options.get("page_indices", False)
    src, dst = (None if index is None else index.tolist() for index in (call.src_indices, call.dst_indices))
    if src is None and dst is None:
        first = next(iter(call.named_caches().values()), None)
        src = dst = list(range(0 if first is None else capacity(first, is_mla(call.op), pages)))
    elif src is None:
        src = list(range(len(dst)))
    elif dst is None:
        dst = list(range(len(src)))
    return src, dst


def rounds(src: list, dst: list) -> list:
    """Where a destination is named more than once any of its sources may win, byte by byte. Each round is a list of
    (source, destination) in which every destination occurs once; over all rounds every candidate is chosen."""
    candidates = defaultdict(list)
    for s, d in zip(src, dst, strict=True):
        candidates[d].append(s)
    depth = max(map(len, candidates.values()), default=1)
    return [[(sources[min(i, len(sources) - 1)], d) for d, sources in candidates.items()] for i in range(depth)]


def place(unit: torch.Tensor, size: int, pages: bool):
    """What a unit index selects from [pages, page_size, ...]."""
    return (unit,) if pages else (unit // size, unit % size)


def expected(call: Call, before: Snapshot) -> list:
    """The snapshots that may follow: one, or several of which each byte may choose where destinations repeat."""
    mla, pages = is_mla(call.op), call.options.get("page_indices", False)
    alternatives = []
    for pairs in rounds(*units(call)):
        src, dst = (torch.tensor(side, dtype=torch.int64) for side in zip(*pairs, strict=True)) if pairs else ([], [])
        after = before.clone()
        for sources, destinations in call.pairs():
            src_planes = [p for cache in sources for p in planes(cache, before.bytes_of(cache), mla)]
            dst_planes = [p for cache in destinations for p in planes(cache, after.bytes_of(cache), mla)]
            assert len(src_planes) == len(dst_planes)
            if not pairs or not src_planes:
                continue
            src_place = place(src, page_size(sources[0], mla), pages)
            dst_place = place(dst, page_size(destinations[0], mla), pages)
            for src_plane, dst_plane in zip(src_planes, dst_planes, strict=True):
                dst_plane[dst_place] = src_plane[src_place]
        alternatives.append(after)
    return alternatives


def fill(call: Call, seed: int = 0) -> None:
    """Random bytes in all that is read, poison in all that is only written."""
    generator = torch.Generator().manual_seed(seed)
    written = {storage_key(tensor): tensor for _, destinations in call.pairs() for tensor in destinations}
    read = {storage_key(tensor): tensor for sources, _ in call.pairs() for tensor in sources}
    for tensor in written.values():
        storage_bytes(tensor).fill_(POISON)
    for tensor in read.values():
        storage = storage_bytes(tensor)
        storage.copy_(torch.randint(0, POISON, storage.shape, dtype=torch.uint8, generator=generator))


def synchronize(call: Call) -> None:
    for tensor in reachable(call).values():
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


def reachable(call: Call) -> dict[str, torch.Tensor]:
    """Every tensor of a call by name."""
    indices = {"src_indices": call.src_indices, "dst_indices": call.dst_indices}
    return {**call.named_caches(), **{name: index for name, index in indices.items() if index is not None}}


def assert_bytes(call: Call, alternatives: list, what: str) -> None:
    """Every storage that the call can reach holds what one of the alternatives says."""
    synchronize(call)
    views = defaultdict(dict)
    for name, tensor in reachable(call).items():
        views[storage_key(tensor)][name] = tensor
    for key, storage in Snapshot(reachable(call).values()).storages.items():
        assert_same_bytes(storage, [alternative.storages[key] for alternative in alternatives], views[key], what)


def check(call: Call, run=Call.run) -> None:
    """Makes the call, by `run`, on random sources and poisoned destinations, and checks every byte."""
    fill(call)
    before = Snapshot(reachable(call).values())
    alternatives = expected(call, before)
    synchronize(call)
    run(call)
    assert_bytes(call, alternatives, call.op)
