"""What a token owns in the KV cache of a few models."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = 2  # bf16


@dataclass(frozen=True)
class Model:
    layers: int
    row: tuple[int, ...]  # (heads, head_dim), or (latent,) for MLA
    parts: tuple[str, ...]  # the caches a layer has

    @property
    def row_bytes(self) -> int:
        return DTYPE_BYTES * self.row[0] * (self.row[1] if len(self.row) > 1 else 1)


MODELS = {
    "Llama-3-8B": Model(layers=32, row=(8, 128), parts=("K", "V")),
    "Qwen2.5-32B": Model(layers=64, row=(8, 128), parts=("K", "V")),
    "DeepSeek-V3": Model(layers=61, row=(576,), parts=("latent",)),
}


@dataclass(frozen=True)
class Block:
    """One block of the trace as the pools hold it: the unit that is cached, offloaded and restored."""

    model: Model
    layers: int
    tokens: int
    page_size: int

    @property
    def pages(self) -> int:
        return self.tokens // self.page_size

    @property
    def rows(self) -> int:
        return len(self.model.parts) * self.layers * self.tokens

    @property
    def bytes(self) -> int:
        return self.rows * self.model.row_bytes
