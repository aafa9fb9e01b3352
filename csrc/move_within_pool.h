// Moves within one pool, where a row may be both source and destination: gather all, then scatter all. Planes share no
// byte, so that some layers after others need a buffer of some layers only.
#pragma once

#include <algorithm>

#include "through_buffer.h"

namespace kvops {

// Of the buffer: a piece that stays in the last-level cache of today's GPUs and CPUs between gather and scatter.
constexpr int64_t kMoveBufferBytes = 32 << 20;

// Visits plans that together are the given one: some layers of one block each, at most about `bytes` large, all units.
template <class Visit>
void each_layer_group(const Plan& plan, int64_t bytes, const Visit& visit) {
    for (const Block& block : plan.blocks) {
        const int64_t layer_bytes = std::max<int64_t>(1, block.unit_bytes() / block.layers * plan.count);
        const int64_t layers = std::clamp<int64_t>(bytes / layer_bytes, 1, block.layers);
        for (int64_t layer = 0; layer < block.layers; layer += layers) {
            Block some = block;
            some.layers = std::min(layers, block.layers - layer);
            some.src += layer * block.src_strides.layer;
            some.dst += layer * block.dst_strides.layer;
            Plan part = plan;
            part.blocks.assign(1, some);
            visit(part);
        }
    }
}

// Visits the halves of each group in turn. One buffer, from allocate(bytes), serves them all.
template <class Allocate, class Visit>
void each_move(const Plan& plan, int buffer_device, const Allocate& allocate, const Visit& visit) {
    int64_t largest = 0;
    each_layer_group(plan, kMoveBufferBytes,
                     [&](const Plan& part) { largest = std::max(largest, buffer_bytes(part, plan.count)); });
    char* buffer = allocate(largest);
    each_layer_group(plan, kMoveBufferBytes, [&](const Plan& part) {
        visit(through_buffer(part, 0, part.count, Shape::of_src, 1, buffer, buffer_device));
    });
}

}  // namespace kvops
