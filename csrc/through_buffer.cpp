#include "through_buffer.h"

#include <algorithm>
#include <array>

namespace kvops {
namespace {

constexpr int64_t kAlignment =
    256;  // of a block within the buffer: rows keep the width of access that they have elsewhere

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Strides without gaps for one block, the dimensions ordered as `like` has them; pages (or single units) outermost.
SideStrides dense_strides(const Block& block, const SideStrides& like, int64_t page_size) {
    struct Axis {
        int64_t size;
        int64_t stride;
        int64_t SideStrides::* member;
    };
    const int64_t slots = std::max(block.slots, page_size);
    std::array<Axis, 3> axes{{{block.layers, like.layer, &SideStrides::layer},
                              {slots, like.slot, &SideStrides::slot},
                              {block.heads, like.head, &SideStrides::head}}};
    std::stable_sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) {
        // An axis of one step has a stride without meaning: it may lie anywhere.
        return (a.size > 1 ? a.stride : 0) < (b.size > 1 ? b.stride : 0);
    });
    SideStrides dense{};
    int64_t extent = block.head_bytes;
    for (const Axis& axis : axes) {
        dense.*axis.member = extent;
        extent *= axis.size;
    }
    dense.page = extent;
    return dense;
}

}  // namespace

int64_t whole_page_size(const Plan& plan, const Side& side) {
    const int64_t page_size = side.page_size;
    if (page_size <= 1 || plan.count % page_size != 0) return 1;
    for (int64_t unit = 0; unit < plan.count; unit += page_size) {
        const int64_t first = side.indices[unit];
        if (first % page_size != 0) return 1;
        for (int64_t slot = 1; slot < page_size; ++slot) {
            if (side.indices[unit + slot] != first + slot) return 1;
        }
    }
    return page_size;
}

HostSide host_side_of(const Plan& plan) {
    const bool is_source = plan.src.device < 0;
    return {is_source, is_source ? Shape::of_src : Shape::of_dst,
            whole_page_size(plan, is_source ? plan.src : plan.dst)};
}

Halves through_buffer(const Plan& plan, int64_t begin, int64_t end, Shape shape, int64_t page_size, char* buffer,
                      int buffer_device) {
    Halves halves;
    for (Plan* half : {&halves.into, &halves.out_of}) {
        half->op = plan.op;
        half->pages = plan.pages;
        half->count = end - begin;
        half->src = plan.src;
        half->dst = plan.dst;
        half->src.indices = plan.src.indices.from(begin);
        half->dst.indices = plan.dst.indices.from(begin);
    }
    for (Side* side : {&halves.into.dst, &halves.out_of.src}) {
        *side = Side{};
        side->device = buffer_device;
        side->page_size = page_size;
        side->limit = end - begin;
        side->limit_argument = "the buffer";
    }
    for (const Block& block : plan.blocks) {
        const SideStrides dense =
            dense_strides(block, shape == Shape::of_src ? block.src_strides : block.dst_strides, page_size);
        Block into = block, out_of = block;
        into.dst = buffer;
        into.dst_strides = dense;
        out_of.src = buffer;
        out_of.src_strides = dense;
        halves.into.blocks.push_back(into);
        halves.out_of.blocks.push_back(out_of);
        buffer += aligned(block.unit_bytes() * (end - begin));
    }
    return halves;
}

int64_t buffer_bytes(const Plan& plan, int64_t units) {
    int64_t bytes = 0;
    for (const Block& block : plan.blocks) bytes += aligned(block.unit_bytes() * units);
    return bytes;
}

int64_t units_in(const Plan& plan, int64_t bytes, int64_t page_size) {
    const int64_t unit_bytes = std::max<int64_t>(1, plan.bytes() / std::max<int64_t>(1, plan.count));
    const int64_t units = std::max(page_size, bytes / unit_bytes / page_size * page_size);
    return std::min(units, plan.count);
}

}  // namespace kvops
