"""The CPU backend against what a user would write instead, and against memcpy.

    python benchmarks/cpu.py            # writes benchmarks/results/cpu.json
    python benchmarks/cpu.py --quick    # seconds; checks that the script works, writes nothing

Tables are larger than the last-level cache. Bytes are those of the rows that move, counted once.
"""

from __future__ import annotations

import argparse

import torch
from measure import interleaved_seconds, save

import kvops


def contenders(rows: int, row_bytes: int, table_rows: int, order: str) -> dict:
    source = torch.randint(0, 256, (table_rows, row_bytes), dtype=torch.uint8)
    kvops_destination, torch_destination, copy_destination = (
        torch.zeros(rows, row_bytes, dtype=torch.uint8) for _ in "123"
    )
    generator = torch.Generator().manual_seed(1)
    if order == "random":
        src_indices = torch.randperm(table_rows, generator=generator)[:rows]
        dst_indices = torch.randperm(rows, generator=generator)
    else:  # pages of 64 KiB, each in one piece, in random order
        page = (64 << 10) // row_bytes
        pages = torch.randperm(table_rows // page, generator=generator)[: rows // page]
        src_indices = (pages[:, None] * page + torch.arange(page)).flatten()
        dst_indices = torch.arange(rows)
    contiguous = source[:rows]

    def with_kvops() -> None:
        kvops.transfer_kv_per_layer_mla(source, kvops_destination, src_indices, dst_indices)

    def with_torch() -> None:
        torch_destination[dst_indices] = source[src_indices]

    def with_copy() -> None:
        copy_destination.copy_(contiguous)

    with_kvops()
    with_torch()
    assert torch.equal(kvops_destination, torch_destination), "kvops and torch disagree"
    return {"kvops": with_kvops, "torch indexing": with_torch, "copy_": with_copy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    scale, repeat = (64, 2) if options.quick else (1, 15)
    mebi = 1 << 20
    cases = [
        (1 << 10, 64 * mebi, "random"),
        (1 << 10, 512 * mebi, "random"),
        (128, 64 * mebi, "random"),
        (1 << 10, 64 * mebi, "pages"),
        (1 << 10, 512 * mebi, "pages"),
    ]
    results = []
    for row_bytes, table_bytes, order in cases:
        rows = (64 * mebi) // row_bytes // scale
        runs = contenders(rows, row_bytes, table_bytes // row_bytes // scale, order)
        seconds = interleaved_seconds(runs, repeat)
        gbs = {name: rows * row_bytes / time / 1e9 for name, time in seconds.items()}
        case = {"row_bytes": row_bytes, "rows": rows, "table_bytes": table_bytes // scale, "order": order, "GB/s": gbs}
        case["times torch indexing"] = gbs["kvops"] / gbs["torch indexing"]
        case["times copy_"] = gbs["kvops"] / gbs["copy_"]
        results.append(case)
        speeds = ", ".join(f"{name} {value:.1f}" for name, value in gbs.items())
        print(
            f"{row_bytes:5d} B rows, {order:6s}, {table_bytes // scale // mebi:4d} MiB table: {speeds} GB/s; "
            f"{case['times torch indexing']:.1f}x torch indexing, {case['times copy_']:.2f}x copy_"
        )
    if not options.quick:
        print(save("cpu", {"cases": results}))


if __name__ == "__main__":
    main()
