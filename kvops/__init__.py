"""kvops: PyTorch operators that move paged KV caches between GPU and host memory.

The operators are ``torch.ops.kvops.*``; the functions below are their typed, documented fronts.
"""

from kvops._library import load as _load

_load()

import kvops.meta  # noqa: E402, F401  (the fakes; they need the operators' schemas)
from kvops.availability import cuda_available  # noqa: E402
from kvops.build_info import VERSION as __version__  # noqa: E402
from kvops.ops import (  # noqa: E402
    Engine,
    move_kv,
    move_kv_mla,
    transfer_kv_all_layer,
    transfer_kv_all_layer_mla,
    transfer_kv_per_layer,
    transfer_kv_per_layer_mla,
)

__all__ = [
    "Engine",
    "__version__",
    "cuda_available",
    "move_kv",
    "move_kv_mla",
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_mla",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_mla",
]
