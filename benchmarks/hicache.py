"""Bandwidth between a GPU pool and pinned host memory, on the grid of SGLang's public HiCache benchmark.

    python benchmarks/hicache.py            # writes benchmarks/results/hicache.json
    python benchmarks/hicache.py --quick    # a corner of the grid, on the CPU where there is no GPU; writes nothing

8 layers, 256 Ki tokens on the GPU, 512 Ki in host memory, bf16, page size 1, K and V, host indices sorted and random.
"load" brings one layer to the GPU in a call a layer; "store" takes all layers to the host in one call. Every provider
is checked against the source before it is timed. The ceiling is one contiguous copy of the same bytes for K and one
for V, in the same run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from measure import GpuTimer, save
from tqdm import tqdm

import kvops

LAYERS = 8
ENGINES = ("auto", "sm", "copy", "staged")


class Pools:
    """The two pools of K and of V: [layers, tokens, heads, head_dim], and indices into them."""

    def __init__(self, elements: int, device_tokens: int, host_tokens: int, device: str) -> None:
        shape = (1, elements)
        pinned = device == "cuda"
        host = (LAYERS, host_tokens, *shape)
        self.host_k = torch.empty(host, dtype=torch.bfloat16, pin_memory=pinned)
        self.host_v = torch.empty(host, dtype=torch.bfloat16, pin_memory=pinned)
        self.device_k = torch.empty((LAYERS, device_tokens, *shape), dtype=torch.bfloat16, device=device)
        self.device_v = torch.empty_like(self.device_k)
        for pool in (self.host_k, self.host_v, self.device_k, self.device_v):
            fill(pool)
        self.row_bytes = elements * 2


def fill(pool: torch.Tensor) -> None:
    """Random bytes, each piece turned by another step: drawing gigabytes on the CPU would take minutes."""
    flat = pool.view(torch.int16).view(-1)
    piece = min(flat.numel(), 16 << 20)
    drawn = torch.randint(
        -30000, 30000, (piece,), dtype=torch.int16, device="cuda" if torch.cuda.is_available() else "cpu"
    )
    for number, start in enumerate(range(0, flat.numel(), piece)):
        part = flat[start : start + piece]
        part.copy_(drawn.roll(number)[: part.numel()])


def indices(pools: Pools, batch: int, is_sorted: bool, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    host = torch.randperm(pools.host_k.shape[1], generator=generator)[:batch]
    device = torch.randperm(pools.device_k.shape[1], generator=generator)[:batch]
    return (host.sort().values if is_sorted else host), device


def loads(pools: Pools, host: torch.Tensor, device: torch.Tensor) -> dict[str, Callable[[int], object]]:
    """Provider -> a load of one layer. Index tensors lie on the GPU, for torch's host side on the CPU."""
    place = pools.device_k.device
    on_device = device.to(place)
    host_on_device = host.to(place)

    def with_kvops(engine: str) -> Callable[[int], object]:
        # The copy and staged engines read index values on the host, auto and SM take them as a serving engine has them.
        source, target = (host, device) if engine in ("copy", "staged") else (host_on_device, on_device)
        return lambda layer: kvops.transfer_kv_per_layer(
            pools.host_k[layer],
            pools.device_k[layer],
            pools.host_v[layer],
            pools.device_v[layer],
            source,
            target,
            engine=engine,
        )

    def with_torch(layer: int) -> None:
        pools.device_k[layer][on_device] = pools.host_k[layer][host].to(place, non_blocking=True)
        pools.device_v[layer][on_device] = pools.host_v[layer][host].to(place, non_blocking=True)

    count = len(host)

    def ceiling(layer: int) -> None:
        pools.device_k[layer, :count].copy_(pools.host_k[layer, :count], non_blocking=True)
        pools.device_v[layer, :count].copy_(pools.host_v[layer, :count], non_blocking=True)

    engines = ENGINES if place.type == "cuda" else ("auto",)
    return {engine: with_kvops(engine) for engine in engines} | {"torch indexing": with_torch, "ceiling": ceiling}


def stores(pools: Pools, host: torch.Tensor, device: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Provider -> a store of all layers."""
    place = pools.device_k.device
    on_device = device.to(place)
    host_on_device = host.to(place)

    def stack(pool: torch.Tensor) -> list[torch.Tensor]:
        return [pool.unsqueeze(2)]

    device_k, device_v, host_k, host_v = map(stack, (pools.device_k, pools.device_v, pools.host_k, pools.host_v))

    def with_kvops(engine: str) -> Callable[[], object]:
        source, target = (device, host) if engine in ("copy", "staged") else (on_device, host_on_device)
        return lambda: kvops.transfer_kv_all_layer(device_k, host_k, device_v, host_v, source, target, engine=engine)

    def with_torch() -> None:
        for layer in range(LAYERS):
            pools.host_k[layer][host] = pools.device_k[layer][on_device].cpu()
            pools.host_v[layer][host] = pools.device_v[layer][on_device].cpu()

    count = len(host)

    def ceiling() -> None:
        for layer in range(LAYERS):
            pools.host_k[layer, :count].copy_(pools.device_k[layer, :count], non_blocking=True)
            pools.host_v[layer, :count].copy_(pools.device_v[layer, :count], non_blocking=True)

    engines = ENGINES if place.type == "cuda" else ("auto",)
    return {engine: with_kvops(engine) for engine in engines} | {"torch indexing": with_torch, "ceiling": ceiling}


def check(pools: Pools, host: torch.Tensor, device: torch.Tensor, run: Callable[[], object], loads_rows: bool) -> None:
    """Zeroes some of the rows that `run` writes, runs it, and compares them with their source."""
    probe = torch.randperm(len(host), generator=torch.Generator().manual_seed(1))[:1024]
    near_rows, far_rows = device[probe].to(pools.device_k.device), host[probe]
    for near, far in ((pools.device_k, pools.host_k), (pools.device_v, pools.host_v)):
        if loads_rows:
            near[:, near_rows] = 0
        else:
            far[:, far_rows] = 0
    run()
    if near_rows.is_cuda:
        torch.cuda.synchronize()
    for near, far in ((pools.device_k, pools.host_k), (pools.device_v, pools.host_v)):
        near, far = near.view(torch.int16), far.view(torch.int16)  # as numbers, a NaN would not equal itself
        if not torch.equal(near[:, near_rows].cpu(), far[:, far_rows]):
            raise AssertionError("a provider moved wrong bytes")


def run_all_layers(load: Callable[[int], object]) -> Callable[[], object]:
    return lambda: [load(layer) for layer in range(LAYERS)]


def described(row: dict) -> str:
    cells = [f"{name} {speed['GB/s']:.1f}/{row['store'][name]['GB/s']:.1f}" for name, speed in row["load"].items()]
    return f"{row['row_bytes']:5d} B x {row['batch']:5d} {'sorted' if row['sorted'] else 'random'}: {'  '.join(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--elements", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[2**i for i in range(16)])
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    place = "cuda" if kvops.cuda_available() else "cpu"
    if options.quick:
        options.elements, options.batches, options.repeat = [64, 512], [1, 64], 2
    elif place == "cpu":
        sys.exit(f"no GPU: {kvops.cuda_available().reason} (--quick runs a corner of the grid on the CPU)")
    tokens = (1 << 12, 1 << 13) if options.quick else (256 << 10, 512 << 10)

    timer = GpuTimer() if place == "cuda" else None
    rows = []
    progress = tqdm(total=len(options.elements) * len(options.batches) * 2, disable=None)
    for elements in options.elements:
        pools = Pools(elements, *tokens, place)
        for batch in options.batches:
            for is_sorted in (True, False):
                host, device = indices(pools, batch, is_sorted)
                row = {"row_bytes": pools.row_bytes, "batch": batch, "sorted": is_sorted, "load": {}, "store": {}}
                runs = [("load", name, run_all_layers(load)) for name, load in loads(pools, host, device).items()]
                runs += [("store", name, store) for name, store in stores(pools, host, device).items()]
                for direction, name, run in runs:
                    if name != "ceiling":
                        check(pools, host, device, run, direction == "load")
                    if timer is not None:
                        time = timer.median_ms(run, options.repeat)
                        bytes_moved = LAYERS * 2 * batch * pools.row_bytes
                        row[direction][name] = {"us a layer": time * 1e3 / LAYERS, "GB/s": bytes_moved / time / 1e6}
                rows.append(row)
                if timer is not None:
                    progress.write(described(row))
                progress.update()
        del pools
    progress.close()
    if place == "cpu":
        print("all providers agree")
        return
    if not options.quick:
        print(save("hicache", {"layers": LAYERS, "device_tokens": tokens[0], "host_tokens": tokens[1], "rows": rows}))


if __name__ == "__main__":
    main()
