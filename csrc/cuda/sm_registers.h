// Idea: a slab's pieces pass through registers. Each lane loads several pieces, 32 lanes side by side, before it stores the
// first, and many warps do so at once. Many warps with few pieces each beat the reverse: while some wait for the bus,
// others work out addresses. Serves every width of access and every GPU. What bounds it: the bus; on one SM, the loads that its registers leave room for.
#pragma once

#include "sm_walk.h"

namespace kvops::cuda {

constexpr int kRegisterThreads = 1024;
constexpr int kRegisterPieces = 4;             // in flight a lane
constexpr int kRegisterChunk = 256;            // pieces of a chunk at most: what a warp has in flight
constexpr int kRegisterSmallestChunk = kWarp;  // where there is not work for all warps otherwise

template <class Word>
__device__ void move_slab(const Walk& walk, const Item& item, uint32_t items) {
    const uint32_t lane = threadIdx.x % kWarp;
    const uint32_t pieces = items * walk.chunk_pieces.divisor;
    for (uint32_t first = 0; first < pieces; first += kRegisterPieces * kWarp) {
        Word data[kRegisterPieces];
        char* to[kRegisterPieces];
        bool there[kRegisterPieces];
#pragma unroll
        for (int i = 0; i < kRegisterPieces; ++i) {
            const uint32_t piece = first + i * kWarp + lane;
            const uint32_t owner = walk.chunk_pieces(piece);
            const uint32_t within = piece - owner * walk.chunk_pieces.divisor;
            const char* from = from_lane(item.src, owner) + within * sizeof(Word);
            to[i] = from_lane(item.dst, owner) + within * sizeof(Word);
            there[i] = within < __shfl_sync(~0u, item.pieces, static_cast<int>(owner)) && piece < pieces;
            if (there[i]) data[i] = __ldcs(reinterpret_cast<const Word*>(from));
        }
#pragma unroll
        for (int i = 0; i < kRegisterPieces; ++i) {
            if (there[i]) __stcs(reinterpret_cast<Word*>(to[i]), data[i]);
        }
    }
}

template <class Word, int kPayload>
__global__ void __launch_bounds__(kRegisterThreads, 1)
    move_by_registers(const __grid_constant__ Launch<kPayload> launch) {
    const uint32_t lane = threadIdx.x % kWarp;
    const uint32_t step = gridDim.x * (kRegisterThreads / kWarp);
    for (uint32_t number = blockIdx.x + gridDim.x * (threadIdx.x / kWarp); number < launch.slabs; number += step) {
        const Slab slab = slab_at(launch, number);
        const Walk& walk = launch.walks[slab.walk];
        Item item{nullptr, nullptr, 0};
        if (lane < slab.items) item = item_at<Word>(launch, walk, slab.first + lane);
        move_slab<Word>(walk, item, slab.items);
    }
}

}  // namespace kvops::cuda
