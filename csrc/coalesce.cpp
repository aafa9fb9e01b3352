#include "coalesce.h"

#include <algorithm>
#include <optional>

namespace kvops {
namespace {

// The slot stride counts even where a unit has one slot: it also says where a token's index lies in its page.
bool same_strides(const SideStrides& a, const SideStrides& b, const Block& shape) {
    return a.page == b.page && a.slot == b.slot && (shape.heads == 1 || a.head == b.head);
}

void remove_axis(Fragments& fragments, int i) {
    std::copy(fragments.axis + i + 1, fragments.axis + fragments.axes, fragments.axis + i);
    --fragments.axes;
}

bool lengthen_fragment(Fragments& fragments) {
    for (int i = 0; i < fragments.axes; ++i) {
        const FragmentAxis& axis = fragments.axis[i];
        if (axis.src_stride != fragments.fragment_bytes || axis.dst_stride != fragments.fragment_bytes) continue;
        fragments.fragment_bytes *= axis.size;
        remove_axis(fragments, i);
        return true;
    }
    return false;
}

bool join_two_axes(Fragments& fragments) {
    for (int i = 0; i < fragments.axes; ++i) {
        for (int j = 0; j < fragments.axes; ++j) {
            const FragmentAxis& outer = fragments.axis[i];
            FragmentAxis& inner = fragments.axis[j];
            const bool continues =
                outer.src_stride == inner.size * inner.src_stride && outer.dst_stride == inner.size * inner.dst_stride;
            if (i == j || !continues) continue;
            inner.size *= outer.size;
            remove_axis(fragments, i);
            return true;
        }
    }
    return false;
}

// `low` with the layers of `high` after its own, if they are of one shape and the steps between layers constant.
std::optional<Block> joined(const Block& low, const Block& high) {
    const int64_t src_step = high.src - low.src - (low.layers - 1) * low.src_strides.layer;
    const int64_t dst_step = high.dst - low.dst - (low.layers - 1) * low.dst_strides.layer;
    // Strides of a cache are never negative.
    if (src_step < 0 || dst_step < 0) return std::nullopt;
    const auto fits = [&](const Block& block) {
        return block.layers == 1 || (block.src_strides.layer == src_step && block.dst_strides.layer == dst_step);
    };
    const bool same_shape = low.slots == high.slots && low.heads == high.heads && low.head_bytes == high.head_bytes &&
                            same_strides(low.src_strides, high.src_strides, low) &&
                            same_strides(low.dst_strides, high.dst_strides, low);
    if (!same_shape || !fits(low) || !fits(high)) return std::nullopt;
    Block stack = low;
    stack.layers += high.layers;
    stack.src_strides.layer = src_step;
    stack.dst_strides.layer = dst_step;
    stack.several_tensors = true;
    return stack;
}

}  // namespace

Fragments coalesce(const Block& block) {
    Fragments fragments{};
    fragments.src = block.src;
    fragments.dst = block.dst;
    fragments.src_page = block.src_strides.page;
    fragments.src_slot = block.src_strides.slot;
    fragments.dst_page = block.dst_strides.page;
    fragments.dst_slot = block.dst_strides.slot;

    fragments.fragment_bytes = block.head_bytes;
    const auto add = [&](int64_t size, int64_t src_stride, int64_t dst_stride) {
        if (size != 1) fragments.axis[fragments.axes++] = {size, src_stride, dst_stride};
    };
    add(block.layers, block.src_strides.layer, block.dst_strides.layer);
    add(block.slots, block.src_strides.slot, block.dst_strides.slot);
    add(block.heads, block.src_strides.head, block.dst_strides.head);
    while (lengthen_fragment(fragments) || join_two_axes(fragments)) {
    }
    std::stable_sort(fragments.axis, fragments.axis + fragments.axes, [](const FragmentAxis& a, const FragmentAxis& b) {
        return a.src_stride != b.src_stride ? a.src_stride > b.src_stride : a.dst_stride > b.dst_stride;
    });
    return fragments;
}

std::vector<Block> fuse(std::vector<Block> blocks) {
    std::vector<Block> fused;
    for (const Block& block : blocks) {
        std::optional<Block> stack;
        if (!fused.empty()) {
            stack = joined(fused.back(), block);
            // Tensors made one by one often lie downwards in memory.
            if (!stack) stack = joined(block, fused.back());
        }
        if (stack) {
            fused.back() = *stack;
        } else {
            fused.push_back(block);
        }
    }
    return fused;
}

}  // namespace kvops
