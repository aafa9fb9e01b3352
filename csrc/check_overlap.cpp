#include "check_overlap.h"

#include <string>

#include "byte_sets.h"

namespace kvops {
namespace {

// The argument of either side that a block belongs to.
const CachePair& pair_of(const Request& request, const Geometry& geometry, size_t block) {
    size_t pair = 0;
    while (block >= geometry.blocks_before[pair + 1]) ++pair;
    return request.pairs[pair];
}

// Index values are checked before the first byte moves and read again while rows are written: they must not change.
void check_indices_stay(const Request& request, const Geometry& geometry, const std::vector<ByteSet>& dst) {
    const Plan& plan = geometry.plan;
    const auto check = [&](const char* name, const Indices& indices) {
        if (indices.data == nullptr) return;
        const int64_t width = indices.is_64bit ? 8 : 4;
        ByteSet read(static_cast<const char*>(indices.data), width);
        read.add(plan.count, indices.stride * width);
        for (size_t i = 0; i < dst.size(); ++i) {
            if (may_share_bytes(read, dst[i])) {
                fail(plan.op, std::string(name) + " and " + pair_of(request, geometry, i).dst.name +
                                  " share memory, expected indices that the transfer does not overwrite");
            }
        }
    };
    check("src_indices", plan.src.indices);
    check("dst_indices", plan.dst.indices);
}

}  // namespace

void check_overlap(const Request& request, const Geometry& geometry) {
    const Plan& plan = geometry.plan;
    std::vector<ByteSet> src, dst;
    for (const Block& block : plan.blocks) {
        src.push_back(src_bytes(plan, block));
        dst.push_back(dst_bytes(plan, block));
    }
    for (size_t i = 0; i < dst.size(); ++i) {
        if (overlaps_itself(dst[i])) {
            fail(plan.op, std::string(pair_of(request, geometry, i).dst.name) +
                              " overlaps itself, expected every element at its own address");
        }
    }
    if (const auto shared = first_shared(dst)) {
        const char* one = pair_of(request, geometry, shared->first).dst.name;
        const char* other = pair_of(request, geometry, shared->second).dst.name;
        fail(plan.op, std::string(one) + " and " + other + " share memory, expected destinations that share no byte");
    }
    check_indices_stay(request, geometry, dst);
    if (request.within_pool) return;
    if (const auto shared = first_shared(src, dst)) {
        const char* one = pair_of(request, geometry, shared->first).src.name;
        const char* other = pair_of(request, geometry, shared->second).dst.name;
        fail(plan.op, std::string(one) + " and " + other + " share memory, expected planes that share no byte: use " +
                          (request.latent ? "move_kv_mla" : "move_kv") + " to move rows within one pool");
    }
}

}  // namespace kvops
