#include "coalesce.h"

#include <algorithm>

namespace kvops {
namespace {

bool same_strides(const SideStrides& a, const SideStrides& b, const Block& shape) {
    return a.page == b.page && (shape.slots == 1 || a.slot == b.slot) && (shape.heads == 1 || a.head == b.head);
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

    FragmentAxis axes[3];
    int count = 0;
    const auto add = [&](int64_t size, int64_t src_stride, int64_t dst_stride) {
        if (size != 1) axes[count++] = {size, src_stride, dst_stride};
    };
    add(block.layers, block.src_strides.layer, block.dst_strides.layer);
    add(block.slots, block.src_strides.slot, block.dst_strides.slot);
    add(block.heads, block.src_strides.head, block.dst_strides.head);
    std::stable_sort(axes, axes + count, [](const FragmentAxis& a, const FragmentAxis& b) {
        return a.src_stride != b.src_stride ? a.src_stride < b.src_stride : a.dst_stride < b.dst_stride;
    });

    // From the smallest stride up: an axis that continues the one before it, or the fragment, on both sides joins it.
    int64_t fragment = block.head_bytes;
    FragmentAxis kept[3];
    int kept_count = 0;
    for (int i = 0; i < count; ++i) {
        const FragmentAxis& axis = axes[i];
        if (kept_count == 0) {
            if (axis.src_stride == fragment && axis.dst_stride == fragment) {
                fragment *= axis.size;
                continue;
            }
        } else {
            FragmentAxis& inner = kept[kept_count - 1];
            if (axis.src_stride == inner.size * inner.src_stride && axis.dst_stride == inner.size * inner.dst_stride) {
                inner.size *= axis.size;
                continue;
            }
        }
        kept[kept_count++] = axis;
    }
    fragments.fragment_bytes = fragment;
    fragments.axes = kept_count;
    std::reverse_copy(kept, kept + kept_count, fragments.axis);
    return fragments;
}

std::vector<Block> fuse(std::vector<Block> blocks) {
    std::vector<Block> fused;
    for (const Block& block : blocks) {
        if (!fused.empty()) {
            Block& last = fused.back();
            const int64_t src_step = block.src - last.src - (last.layers - 1) * last.src_strides.layer;
            const int64_t dst_step = block.dst - last.dst - (last.layers - 1) * last.dst_strides.layer;
            const auto fits = [&](const Block& stack) {
                return stack.layers == 1 || (stack.src_strides.layer == src_step && stack.dst_strides.layer == dst_step);
            };
            const bool same_shape = last.slots == block.slots && last.heads == block.heads &&
                                    last.head_bytes == block.head_bytes &&
                                    same_strides(last.src_strides, block.src_strides, block) &&
                                    same_strides(last.dst_strides, block.dst_strides, block);
            // Strides of a cache are never negative; steps backwards stay separate blocks.
            if (same_shape && src_step >= 0 && dst_step >= 0 && fits(last) && fits(block)) {
                last.src_strides.layer = src_step;
                last.dst_strides.layer = dst_step;
                last.layers += block.layers;
                last.several_tensors = true;
                continue;
            }
        }
        fused.push_back(block);
    }
    return fused;
}

}  // namespace kvops
