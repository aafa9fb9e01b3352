#include "indices.h"

#include <algorithm>

#include "error.h"

namespace kvops {
namespace {

// One pass without a branch; only a fault looks for its position.
template <class Index>
bool all_within(const Index* values, int64_t stride, int64_t count, int64_t limit) {
    bool within = true;
    for (int64_t i = 0; i < count; ++i) {
        within &= static_cast<uint64_t>(values[i * stride]) < static_cast<uint64_t>(limit);
    }
    return within;
}

}  // namespace

std::string index_error(const char* name, int64_t position, int64_t value, int64_t limit, const std::string& limit_of,
                        bool pages) {
    return std::string(name) + "[" + std::to_string(position) + "] is " + std::to_string(value) +
           ", expected 0 <= index < " + std::to_string(limit) + ", the " + (pages ? "pages" : "tokens") + " of " +
           limit_of;
}

void check_index_values(const Plan& plan, const char* name, const Side& side) {
    const Indices& indices = side.indices;
    const bool no_cache = side.limit_argument[0] == '\0';  // nothing that an index could lie outside of
    if (indices.data == nullptr || indices.device >= 0 || no_cache) return;
    const int64_t count = indices.stride == 0 ? std::min<int64_t>(plan.count, 1) : plan.count;  // one value, repeated
    const bool within = indices.is_64bit
                            ? all_within(static_cast<const int64_t*>(indices.data), indices.stride, count, side.limit)
                            : all_within(static_cast<const int32_t*>(indices.data), indices.stride, count, side.limit);
    if (within) return;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t value = indices[i];
        if (value < 0 || value >= side.limit) {
            fail(plan.op, index_error(name, i, value, side.limit, side.limit_of(), plan.pages));
        }
    }
}

void check_index_values(const Plan& plan) {
    check_index_values(plan, "src_indices", plan.src);
    check_index_values(plan, "dst_indices", plan.dst);
}

}  // namespace kvops
