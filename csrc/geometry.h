// From tensors to a plan: every check that needs no index value and no address, and the plan that follows from them.
#pragma once

#include <vector>

#include "plan.h"
#include "stable.h"

namespace kvops {

// One cache argument. A list is the concatenation of its elements along the layer axis.
struct CacheArgument {
    const char* name;
    const Tensor* tensors;
    size_t size;
    bool is_list;
};

struct CachePair {
    CacheArgument src;
    CacheArgument dst;
};

// A call of any of the operators. They differ only in how the pairs are filled.
struct Request {
    const char* op;
    bool latent;       // rows are [dim] instead of [heads, head_dim]
    bool within_pool;  // source and destination are one pool
    std::vector<CachePair> pairs;
    const Tensor* src_indices;  // null: 0, 1, 2, ...
    const Tensor* dst_indices;
    bool page_indices;
    int64_t engine;
    int64_t num_sms;
};

struct Geometry {
    Plan plan;
    std::vector<size_t> blocks_before;  // of each pair, and of the end: which blocks of the plan belong to which pair

    static Geometry from(const Request& request);
};

}  // namespace kvops
