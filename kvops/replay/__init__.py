"""Replays a request trace through a two-tier paged KV cache whose bytes kvops moves, and checks them.

trace      the requests: a file, or generated ones of the same form
tiers      which blocks lie where, and what a request makes move (no tensors)
models     the rows of a few models
pool       the pages of one tier, in a memory layout
pattern    the bytes every row must hold
replayer   carries a plan of the tiers out: offload, restore, verify, compute
report     what it says at the end
command    the command line
"""
