// Idea: a slab passes through shared memory, and each warp has a ring of several slabs on their way, with no register held
// and no lane waiting for a load. What lies in a run, that is several items that follow each other in memory, is moved by
// one bulk copy of the SM's own copy unit (TMA), separately on each side; what lies scattered is moved by the lanes, 16
// bytes each. Needs compute capability 9.0 and pieces of 16 bytes. What bounds it: the bus; on one SM, the shared memory.
#pragma once

#include "sm_walk.h"

namespace kvops::cuda {

constexpr int kRingWarps = 16;
constexpr int kRingSlabs = 3;  // of a warp's ring
constexpr int kRingAhead = 1;  // slabs that are loaded before the first is stored; the others are being stored
constexpr int kRingSlabBytes = 4096;
constexpr uint32_t kRingRunBytes = 512;  // on average, from which on runs are moved by bulk copies
constexpr int kRingBytes = kRingWarps * kRingSlabs * (kRingSlabBytes + kWarp * 16 + 8);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// PTX ISA, "Asynchronous data copies" and "mbarrier".
__device__ inline void barrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ inline void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void barrier_expect_and_arrive(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
__device__ inline void barrier_arrive_after_loads(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t phase) {
    uint32_t done = 0;
    while (done == 0) {
        asm volatile(
            "{\n .reg .pred done;\n mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n selp.u32 %0, 1, 0, done;\n}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(phase)
            : "memory");
    }
}
__device__ inline void load_piece(char* shared, const char* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ inline void load_run(char* shared, const char* global, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
__device__ inline void store_run(char* global, const char* shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}
__device__ inline void close_store_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most so many of the lane's groups still read shared memory.
template <int kGroups>
__device__ void wait_store_groups() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
// What the lanes wrote to shared memory becomes visible to the copy unit.
__device__ inline void hand_to_copy_unit() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The runs of a slab on one side. An item belongs to the run of the item before it if it follows that in memory without a
// gap; all but the last item of a run are whole chunks, as their places in shared memory are.
struct Runs {
    bool starts;     // at this lane
    uint32_t bytes;  // of the run that starts at this lane
    uint32_t count;  // in the slab
};

template <class T>
__device__ Runs runs_of(T* address, uint32_t pieces, uint32_t chunk_bytes) {
    const uint32_t lane = threadIdx.x % kWarp;
    T* before = reinterpret_cast<T*>(__shfl_up_sync(~0u, reinterpret_cast<unsigned long long>(address), 1));
    const uint32_t pieces_before = __shfl_up_sync(~0u, pieces, 1);
    const bool there = pieces != 0;
    const bool follows = lane != 0 && address == before + chunk_bytes && pieces_before * 16 == chunk_bytes;
    const uint32_t ends = __ballot_sync(~0u, !there || !follows);  // of the run before this lane
    const uint32_t after = lane == kWarp - 1 ? 0 : ends >> (lane + 1);
    const uint32_t last = after == 0 ? kWarp - 1 : lane + __ffs(static_cast<int>(after)) - 1;
    Runs runs;
    runs.starts = there && !follows;
    runs.bytes = (last - lane) * chunk_bytes + __shfl_sync(~0u, pieces, static_cast<int>(last)) * 16;
    runs.count = __popc(__ballot_sync(~0u, runs.starts));
    return runs;
}

// Calls visit(piece of the slab, its owner, its place within the item) for each of the slab's pieces, a lane each.
template <class Visit>
__device__ void each_piece(const Walk& walk, uint32_t items, uint32_t pieces, const Visit& visit) {
    const uint32_t lane = threadIdx.x % kWarp;
    const uint32_t end = items * walk.chunk_pieces.divisor;
#pragma unroll 4
    for (uint32_t first = 0; first < end; first += kWarp) {
        const uint32_t piece = first + lane;
        const uint32_t owner = walk.chunk_pieces(piece);
        const uint32_t within = piece - owner * walk.chunk_pieces.divisor;
        const bool there = within < __shfl_sync(~0u, pieces, static_cast<int>(owner)) && piece < end;
        visit(piece, owner, within, there);
    }
}

// One warp's ring.
struct Ring {
    char* data;
    char** to;
    uint32_t* pieces;
    uint64_t* barriers;
};

template <int kPayload>
__device__ void load_slab(const Launch<kPayload>& launch, const Ring& ring, uint32_t place, const Slab& slab,
                          const Item& item) {
    const uint32_t lane = threadIdx.x % kWarp;
    const Walk& walk = launch.walks[slab.walk];
    const uint32_t chunk_bytes = walk.chunk_pieces.divisor * 16;
    char* data = ring.data + place * kRingSlabBytes;
    uint64_t* barrier = ring.barriers + place;
    ring.to[place * kWarp + lane] = item.dst;
    ring.pieces[place * kWarp + lane] = item.pieces;
    const uint32_t bytes = __reduce_add_sync(~0u, item.pieces) * 16;
    const Runs runs = runs_of(item.src, item.pieces, chunk_bytes);
    if (runs.count * kRingRunBytes <= bytes) {
        if (lane == 0) {
            barrier_expect_and_arrive(barrier, bytes);
        } else {
            barrier_arrive(barrier);
        }
        __syncwarp();
        if (runs.starts) load_run(data + lane * chunk_bytes, item.src, runs.bytes, barrier);
    } else {
        each_piece(walk, slab.items, item.pieces, [&](uint32_t piece, uint32_t owner, uint32_t within, bool there) {
            const char* from = from_lane(item.src, owner) + within * 16;
            if (there) load_piece(data + piece * 16, from);
        });
        barrier_arrive_after_loads(barrier);
    }
}

template <int kPayload>
__device__ void store_slab(const Launch<kPayload>& launch, const Ring& ring, uint32_t place, const Slab& slab) {
    const uint32_t lane = threadIdx.x % kWarp;
    const Walk& walk = launch.walks[slab.walk];
    const uint32_t chunk_bytes = walk.chunk_pieces.divisor * 16;
    const char* data = ring.data + place * kRingSlabBytes;
    char* to = ring.to[place * kWarp + lane];
    const uint32_t pieces = ring.pieces[place * kWarp + lane];
    const uint32_t bytes = __reduce_add_sync(~0u, pieces) * 16;
    const Runs runs = runs_of(to, pieces, chunk_bytes);
    if (runs.count * kRingRunBytes <= bytes) {
        hand_to_copy_unit();
        __syncwarp();
        if (runs.starts) store_run(to, data + lane * chunk_bytes, runs.bytes);
    } else {
        each_piece(walk, slab.items, pieces, [&](uint32_t piece, uint32_t owner, uint32_t within, bool there) {
            char* address = from_lane(to, owner) + within * 16;
            if (there) __stcs(reinterpret_cast<uint4*>(address), *reinterpret_cast<const uint4*>(data + piece * 16));
        });
    }
    close_store_group();
    __syncwarp();
}

#endif

template <int kPayload>
__global__ void __launch_bounds__(kRingWarps* kWarp, 1) move_by_ring(const __grid_constant__ Launch<kPayload> launch) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char shared[];
    constexpr int kPlaces = kRingWarps * kRingSlabs;
    const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    Ring ring;
    ring.data = shared + warp * (kRingSlabs * kRingSlabBytes);
    ring.to = reinterpret_cast<char**>(shared + kPlaces * kRingSlabBytes) + warp * (kRingSlabs * kWarp);
    ring.pieces =
        reinterpret_cast<uint32_t*>(shared + kPlaces * (kRingSlabBytes + kWarp * 8)) + warp * kRingSlabs * kWarp;
    ring.barriers = reinterpret_cast<uint64_t*>(shared + kPlaces * (kRingSlabBytes + kWarp * 12)) + warp * kRingSlabs;
    if (lane == 0) {
        for (int i = 0; i < kRingSlabs; ++i) barrier_init(ring.barriers + i, kWarp);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();

    const uint32_t step = gridDim.x * kRingWarps;
    const uint32_t mine = blockIdx.x + gridDim.x * warp;
    const uint32_t count = mine < launch.slabs ? (launch.slabs - mine + step - 1) / step : 0;
    const auto item_of = [&](const Slab& slab) {
        return lane < slab.items ? item_at<uint4>(launch, launch.walks[slab.walk], slab.first + lane)
                                 : Item{nullptr, nullptr, 0};
    };
    Slab slab{};
    Item item{};
    if (count > 0) {
        slab = slab_at(launch, mine);
        item = item_of(slab);
    }
    for (uint32_t i = 0; i < count + kRingAhead; ++i) {
        if (i < count) {
            wait_store_groups<kRingSlabs - kRingAhead - 1>();
            __syncwarp();
            load_slab(launch, ring, i % kRingSlabs, slab, item);
            if (i + 1 < count) {
                slab = slab_at(launch, mine + (i + 1) * step);
                item = item_of(slab);
            }
        }
        if (i >= kRingAhead) {
            const uint32_t stored = i - kRingAhead;
            barrier_wait(ring.barriers + stored % kRingSlabs, stored / kRingSlabs % 2);
            store_slab(launch, ring, stored % kRingSlabs, slab_at(launch, mine + stored * step));
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

}  // namespace kvops::cuda
