#include "byte_sets.h"

#include <algorithm>

namespace kvops {
namespace {

ByteSet bytes_of(const char* base, const SideStrides& strides, const Block& block, const Side& side) {
    const int64_t pages = (side.limit + side.page_size - 1) / side.page_size;
    ByteSet bytes(base, block.head_bytes);
    bytes.add(pages, strides.page);
    bytes.add(side.page_size > 1 ? std::min(side.limit, side.page_size) : block.slots, strides.slot);
    bytes.add(block.layers, strides.layer);
    bytes.add(block.heads, strides.head);
    return bytes;
}

}  // namespace

ByteSet src_bytes(const Plan& plan, const Block& block) {
    return bytes_of(block.src, block.src_strides, block, plan.src);
}
ByteSet dst_bytes(const Plan& plan, const Block& block) {
    return bytes_of(block.dst, block.dst_strides, block, plan.dst);
}

}  // namespace kvops
