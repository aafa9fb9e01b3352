// What a launch of the SM kernel knows, and how one of its threads finds the rows it has to move.
//
// Everything that a launch moves is numbered as items. An item is a fragment, contiguous on both sides, or a chunk of one
// that is long; the order of items is the order of host addresses, as far as the indices allow. A warp takes as many items
// at a time as there are lanes or fewer, a slab; each lane works out the two addresses of one item, checks its indices, and
// the warp then moves the slab together. So an index is read and an address computed once an item, not once a piece.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "faults.h"

namespace kvops::cuda {

constexpr int kWarp = 32;
constexpr int kMaxWalks = 4;
constexpr int kAxes = 4;  // layers, slots, heads and the units themselves

// Kernel parameters carry plane addresses and, for small calls, the indices: no upload, no allocation. Two sizes, since a
// launch costs more the more parameters it has; 32764 bytes is CUDA's limit from sm_70 on.
constexpr int kSmallPayload = 2560;
constexpr int kLargePayload = 30720;

// Division by a number known before the launch, for dividends below 2^31: q = (hi32(n * multiplier) + n) >> shift, after
// Granlund and Montgomery, "Division by invariant integers using multiplication" (1994).
struct Divider {
    uint32_t divisor = 1;
    uint32_t multiplier = 1;
    uint32_t shift = 0;

    Divider() = default;
    explicit Divider(uint32_t by) : divisor(by) {
        while ((uint64_t(1) << shift) < by) ++shift;
        multiplier = static_cast<uint32_t>(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - by)) / by + 1);
    }
    __device__ uint32_t operator()(uint32_t dividend) const {
        return (__umulhi(dividend, multiplier) + dividend) >> shift;
    }
};

// How one side turns an index into bytes.
struct Addressing {
    int64_t page, slot;
    Divider page_size;     // used where the limit is below 2^31
    int64_t page_size_64;  // used elsewhere; 0: the form above
    bool linear;           // pages follow each other without a gap: no division
};

// Planes of one geometry, and how an item's number is taken apart: chunks of a fragment innermost, then the axes, then bases.
struct Walk {
    Divider chunks;        // of a fragment
    Divider chunk_pieces;  // pieces (words of the kernel) of a chunk
    uint32_t last_pieces;  // of a fragment's last chunk
    int axes;
    Divider axis[kAxes];  // sizes, innermost first
    int64_t src_stride[kAxes];
    int64_t dst_stride[kAxes];  // 0 at the axis of the units
    int unit_axis;
    Addressing src, dst;
    uint32_t first_base, bases;  // in the payload
    uint32_t items;              // in this launch
    uint32_t slab;               // items that a warp takes at a time, at most kWarp
    uint32_t slabs_end;          // slabs of this walk and all before it
};

struct Bases {
    const char* src;
    char* dst;
};

enum IndexKind : int { kCounting, kInt32, kInt64, kInline };

struct DeviceIndices {
    const void* data;
    int64_t stride;
    int64_t first;  // for counting
    int64_t limit;
    uint32_t inline_offset;  // bytes into the payload
    int kind;

    __device__ int64_t at(uint32_t unit, const char* payload) const {
        switch (kind) {
            case kInt32: return __ldg(static_cast<const int32_t*>(data) + unit * stride);
            case kInt64: return __ldg(static_cast<const long long*>(data) + unit * stride);
            case kInline: return reinterpret_cast<const uint32_t*>(payload + inline_offset)[unit];
            default: return first + unit;
        }
    }
    __device__ bool holds(int64_t index) const { return static_cast<uint64_t>(index) < static_cast<uint64_t>(limit); }
};

struct Reporter {
    FaultWord word;
    FaultRecord src, dst;  // all but position and value
    int64_t first_unit;    // of this launch
    bool reports;          // only the first of several launches over the same units does
};

template <int kPayload>
struct alignas(16) Launch {
    Walk walks[kMaxWalks];
    DeviceIndices src, dst, skip;
    bool skips;
    Reporter reporter;
    uint32_t slabs;
    alignas(16) char payload[kPayload];
};
static_assert(sizeof(Launch<kLargePayload>) <= 32764);
static_assert(sizeof(Launch<kSmallPayload>) <= 4096 + 512);

__device__ inline void report(const FaultWord& word, const FaultRecord& fault, int64_t position, int64_t value) {
    if (atomicAdd(word.count, 1u) != 0) return;
    FaultRecord* record = word.record;
    record->op = fault.op;
    record->indices = fault.indices;
    record->limit_argument = fault.limit_argument;
    record->limit_element = fault.limit_element;
    record->position = position;
    record->value = value;
    record->limit = fault.limit;
    record->pages = fault.pages;
    __threadfence_system();
    *static_cast<volatile uint32_t*>(&record->complete) = 1;
}

__device__ __noinline__ inline void report(const Reporter& reporter, uint32_t unit, const DeviceIndices& src,
                                           int64_t src_index, const DeviceIndices& dst, int64_t dst_index) {
    if (!reporter.reports) return;
    if (!src.holds(src_index)) report(reporter.word, reporter.src, reporter.first_unit + unit, src_index);
    if (!dst.holds(dst_index)) report(reporter.word, reporter.dst, reporter.first_unit + unit, dst_index);
}

__device__ inline int64_t offset_of(const Addressing& side, int64_t index) {
    if (side.linear) return index * side.page;
    if (side.page_size_64 == 0) {
        const uint32_t page = side.page_size(static_cast<uint32_t>(index));
        return page * side.page + (static_cast<uint32_t>(index) - page * side.page_size.divisor) * side.slot;
    }
    const int64_t page = index / side.page_size_64;
    return page * side.page + (index - page * side.page_size_64) * side.slot;
}

// Where an item's bytes lie. Nothing to move: no pieces, and addresses of null.
struct Item {
    const char* src;
    char* dst;
    uint32_t pieces;
};

template <class Word, int kPayload>
__device__ Item item_at(const Launch<kPayload>& launch, const Walk& walk, uint32_t number) {
    uint32_t rest = walk.chunks(number);
    const uint32_t chunk = number - rest * walk.chunks.divisor;
    const int64_t within = int64_t(chunk) * (walk.chunk_pieces.divisor * sizeof(Word));
    int64_t src = within, dst = within;
    uint32_t unit = 0;
    bool first_of_unit = chunk == 0;
    for (int axis = 0; axis < walk.axes; ++axis) {
        const bool outermost = axis == walk.axes - 1 && walk.bases == 1;  // what is left is the coordinate
        const uint32_t quotient = outermost ? 0 : walk.axis[axis](rest);
        const uint32_t coordinate = rest - quotient * walk.axis[axis].divisor;
        rest = quotient;
        if (axis == walk.unit_axis) {
            unit = coordinate;
        } else {
            first_of_unit &= coordinate == 0;
            src += coordinate * walk.src_stride[axis];
            dst += coordinate * walk.dst_stride[axis];
        }
    }
    const int64_t src_index = launch.src.at(unit, launch.payload);
    const int64_t dst_index = launch.dst.at(unit, launch.payload);
    const bool skipped = launch.skips && !launch.skip.holds(launch.skip.at(unit, launch.payload));
    if (!launch.src.holds(src_index) || !launch.dst.holds(dst_index)) {
        if (first_of_unit && rest == 0 && &walk == launch.walks) {
            report(launch.reporter, unit, launch.src, src_index, launch.dst, dst_index);
        }
        return {nullptr, nullptr, 0};
    }
    if (skipped) return {nullptr, nullptr, 0};
    const Bases base = reinterpret_cast<const Bases*>(launch.payload)[walk.first_base + rest];
    const bool last = chunk == walk.chunks.divisor - 1;
    return {base.src + src + offset_of(walk.src, src_index), base.dst + dst + offset_of(walk.dst, dst_index),
            last ? walk.last_pieces : walk.chunk_pieces.divisor};
}

// Some items of one walk: what a warp moves at a time.
struct Slab {
    int walk;
    uint32_t first;  // item
    uint32_t items;
};

template <int kPayload>
__device__ Slab slab_at(const Launch<kPayload>& launch, uint32_t number) {
    int w = 0;
    while (number >= launch.walks[w].slabs_end) ++w;
    const Walk& walk = launch.walks[w];
    const uint32_t first = (number - (w == 0 ? 0 : launch.walks[w - 1].slabs_end)) * walk.slab;
    return {w, first, min(walk.slab, walk.items - first)};
}

template <class T>
__device__ T* from_lane(T* pointer, uint32_t lane) {
    return reinterpret_cast<T*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), static_cast<int>(lane)));
}

}  // namespace kvops::cuda
