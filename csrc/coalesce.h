// The simplest loop nest that moves a block: what is contiguous on both sides becomes one fragment.
#pragma once

#include <cstdint>
#include <vector>

#include "plan.h"

namespace kvops {

struct FragmentAxis {
    int64_t size;
    int64_t src_stride;
    int64_t dst_stride;
};

// A unit moves one fragment for each step of the axes: `fragment_bytes` from src to dst, plus the offset of the unit's index
// on each side. Axes are ordered from the largest source stride to the smallest; none has size 1.
struct Fragments {
    const char* src;
    char* dst;
    int64_t src_page, src_slot;  // as in SideStrides
    int64_t dst_page, dst_slot;
    int axes;
    FragmentAxis axis[3];
    int64_t fragment_bytes;

    int64_t per_unit() const {
        int64_t count = 1;
        for (int i = 0; i < axes; ++i) count *= axis[i].size;
        return count;
    }
};

Fragments coalesce(const Block& block);

// Consecutive blocks of one shape whose bases advance by constant steps become one block of more layers: a list of views of
// one pool is then as good as the pool.
std::vector<Block> fuse(std::vector<Block> blocks);

// Visits (src, dst) of each fragment of a unit whose index is 0 on both sides.
template <class Visit>
void each_fragment(const Fragments& fragments, const Visit& visit) {
    FragmentAxis outer{1, 0, 0}, middle{1, 0, 0}, inner{1, 0, 0};
    FragmentAxis* axes[] = {&inner, &middle, &outer};
    for (int i = 0; i < fragments.axes; ++i) *axes[i] = fragments.axis[fragments.axes - 1 - i];
    for (int64_t i = 0; i < outer.size; ++i) {
        for (int64_t j = 0; j < middle.size; ++j) {
            for (int64_t k = 0; k < inner.size; ++k) {
                visit(fragments.src + i * outer.src_stride + j * middle.src_stride + k * inner.src_stride,
                      fragments.dst + i * outer.dst_stride + j * middle.dst_stride + k * inner.dst_stride);
            }
        }
    }
}

}  // namespace kvops
