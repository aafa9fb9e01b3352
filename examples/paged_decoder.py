"""A small decoder whose paged KV cache goes to the host and comes back while it decodes.

    python examples/paged_decoder.py                 # on the GPU if there is one, else on the CPU
    python examples/paged_decoder.py --device cpu --backend eager

Every step of the model is one graph, compiled with fullgraph=True, and kvops moves the cache inside that graph:

    prefill, decode     each layer writes its new keys and values to their slots, then attends
    decode and offload  after the last layer, one call stores the pages of all layers in host memory
    restore and decode  layer l is loaded from host memory right before layer l attends

Between the last two the device pool is overwritten and the sequence gets other pages. The tokens must be those of a
plain eager run that keeps no cache at all: the program prints both and exits with 1 if they differ.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvops

VOCAB, HEADS, KV_HEADS, HEAD_DIM, MLP = 512, 8, 2, 16, 256
HIDDEN = HEADS * HEAD_DIM
PAGE_SIZE, DEVICE_PAGES, HOST_PAGES = 8, 1024, 2048
MAX_TOKENS = PAGE_SIZE * DEVICE_PAGES // 2  # a sequence has two sets of device pages, one after the other


# The model. It knows no pages: `attend(layer, q, k, v)` decides where keys and values are kept, so that the paged run
# and the reference share every other line.


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """RoPE: turn element i and element i + HEAD_DIM / 2 of every head, as a pair, by the angle of token and i."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = rope.unsqueeze(2).unbind(1)  # [tokens, 1, HEAD_DIM / 2], the same for all heads
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # to [1, heads, tokens, head_dim]
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).squeeze(0).transpose(0, 1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * MLP, bias=False)
        self.down = nn.Linear(MLP, HIDDEN, bias=False)

    def forward(self, x: Tensor, rope: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        x = x + self.out(attend(rotate(q, rope), rotate(k, rope), v).flatten(1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        angles = torch.arange(MAX_TOKENS)[:, None] * 10000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2)
        self.register_buffer("rope", torch.stack([angles.cos(), angles.sin()], dim=1))
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        # Several times PyTorch's own spread: attention becomes so sharp that a wrong page shows in the tokens.
        for linear in filter(lambda module: isinstance(module, nn.Linear), self.modules()):
            nn.init.normal_(linear.weight, std=2 * linear.in_features**-0.5)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """The most likely next token, `[1]`."""
        x, rope = self.embedding(tokens), self.rope[positions]
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, partial(attend, i))
        return self.head(self.norm(x[-1:])).argmax(-1)


# The cache.


class DevicePool(NamedTuple):
    """K and V, each a list of one `[pages, page_size, heads, head_dim]` tensor a layer.

    A compiled graph clones none of these. A stack of all layers is not so safe: it is cloned, for one, where new tokens
    are written by index_copy_ and a transfer comes after.
    """

    k: list[Tensor]
    v: list[Tensor]


class HostPool(NamedTuple):
    """K and V, each one `[pages, page_size, layers, heads, head_dim]` tensor: a page's layers lie side by side."""

    k: Tensor
    v: Tensor


class PageMap(NamedTuple):
    """Page `host[i]` of the host pool and page `device[i]` of the device pool hold the same tokens."""

    host: Tensor
    device: Tensor


def step(
    model: Decoder,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    page_table: Tensor,
    pool: DevicePool,
    host: HostPool,
    restore: PageMap | None = None,
    offload: PageMap | None = None,
) -> Tensor:
    """The function to compile: run `tokens` through the model and return the token that follows."""
    # Attention sees every page of the table, so that all decode steps have the same shapes and share one graph. The
    # mask hides the slots that are still to come.
    mask = torch.arange(page_table.numel() * PAGE_SIZE, device=tokens.device) <= positions[:, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_pool, v_pool = pool.k[layer], pool.v[layer]
        if restore is not None:
            # Ahead of the new token, whose slot may be in the last of the restored pages.
            k_host, v_host = host.k[:, :, layer], host.v[:, :, layer]
            kvops.transfer_kv_per_layer(k_host, k_pool, v_host, v_pool, restore.host, restore.device, page_indices=True)
        # None: the new tokens in order. Here the indices are those of tokens, with page_indices those of pages.
        kvops.transfer_kv_per_layer(k, k_pool, v, v_pool, None, slots)
        return attention(q, k_pool[page_table].flatten(0, 1), v_pool[page_table].flatten(0, 1), mask)

    next_token = model(tokens, positions, attend)
    if offload is not None:
        # Another layout is nothing but other strides: the host pool, permuted, is a stack of layers. The device side is
        # a list of layers, and only the number of layers has to agree.
        k_host, v_host = (x.permute(2, 0, 1, 3, 4) for x in host)
        kvops.transfer_kv_all_layer(pool.k, k_host, pool.v, v_host, offload.device, offload.host, page_indices=True)
    return next_token


def generate_paged(model: Decoder, prompt: Tensor, new_tokens: int, backend: str | Callable = "inductor") -> list[int]:
    """Compiled, the cache in pages that leave the device half way."""
    device, layers = prompt.device, len(model.layers)
    pages = -(-(prompt.numel() + new_tokens) // PAGE_SIZE)
    # Zeros, not whatever the memory holds: a masked slot has weight 0, but 0 times NaN is NaN.
    planes = [torch.zeros(DEVICE_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=device) for _ in range(2 * layers)]
    pool = DevicePool(planes[:layers], planes[layers:])
    # Only page-locked memory can be read and written by the GPU itself.
    host_shape = (HOST_PAGES, PAGE_SIZE, layers, KV_HEADS, HEAD_DIM)
    host = HostPool(*(torch.zeros(host_shape, pin_memory=device.type == "cuda") for _ in range(2)))

    # A serving engine's allocator hands out whatever pages are free: none of the three tables is in order.
    table, later_table = torch.randperm(DEVICE_PAGES)[: 2 * pages].to(device).chunk(2)
    host_table = torch.randperm(HOST_PAGES)[:pages].to(device)

    # None or not, and the number of tokens, are guarded: this one function becomes the four graphs named on top.
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    generated: list[Tensor] = []

    def advance(tokens: Tensor, page_table: Tensor, **transfers: PageMap) -> None:
        end = prompt.numel() + len(generated)
        positions = torch.arange(end - tokens.numel(), end, device=device)
        slots = page_table[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        generated.append(compiled(model, tokens, positions, slots, page_table, pool, host, **transfers))

    advance(prompt, table)
    while len(generated) < new_tokens // 2:
        advance(generated[-1], table)
    # With this step's token the cache holds `stored` tokens; the one that it generates is not in the cache yet.
    stored = prompt.numel() + len(generated)
    moved = -(-stored // PAGE_SIZE)
    advance(generated[-1], table, offload=PageMap(host_table[:moved], table[:moved]))

    # No synchronization: like any kernel, a transfer runs on the current stream, after all that was issued before it.
    for plane in planes:
        plane.normal_(std=100)

    advance(generated[-1], later_table, restore=PageMap(host_table[:moved], later_table[:moved]))
    while len(generated) < new_tokens:
        advance(generated[-1], later_table)
    return torch.cat(generated).tolist()


def generate_reference(model: Decoder, prompt: Tensor, new_tokens: int) -> list[int]:
    """Eager, no cache: every step computes the whole sequence anew."""
    tokens = prompt
    for _ in range(new_tokens):
        positions = torch.arange(tokens.numel(), device=prompt.device)
        mask = positions <= positions[:, None]
        next_token = model(tokens, positions, lambda layer, q, k, v, mask=mask: attention(q, k, v, mask))
        tokens = torch.cat([tokens, next_token])
    return tokens[prompt.numel() :].tolist()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Decode with a KV cache that is offloaded and restored half way.")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=45, help="tokens of the (random) prompt")
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens to generate, at least 3")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--backend", choices=["inductor", "aot_eager", "eager"], default="inductor")
    options = parser.parse_args(arguments)
    if options.layers < 1 or options.prompt < 1 or options.new_tokens < 3:
        parser.error("expected at least 1 layer, 1 token of prompt and 3 new tokens")
    if options.prompt + options.new_tokens > MAX_TOKENS:
        parser.error(f"expected at most {MAX_TOKENS} tokens in all")
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and kvops.cuda_available() else "cpu"

    torch.manual_seed(0)
    # float32 without TF32, on the GPU too: compiled and eager code round differently, and the gap between the best and
    # the second best token must stay far above that.
    torch.set_float32_matmul_precision("highest")
    # A transfer records no gradient, and refuses a destination that asks for one.
    model = Decoder(options.layers).requires_grad_(False).to(device)
    prompt = torch.randint(VOCAB, (options.prompt,)).to(device)

    paged = generate_paged(model, prompt, options.new_tokens, options.backend)
    reference = generate_reference(model, prompt, options.new_tokens)
    match = paged == reference
    print(f"paged, compiled, {options.backend}, {device}:", *paged)
    print("reference, eager, no cache:", *reference)
    print("the tokens match" if match else "THE TOKENS DIFFER")
    return 0 if match else 1


if __name__ == "__main__":
    sys.exit(main())
