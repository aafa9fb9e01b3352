// What an engine is given: raw pointers, byte strides and indices. Nothing here knows torch.
//
// A transfer moves `count` units. A unit is one token, or one page. The source index of a unit and the destination index
// of a unit say where it lies on each side; every block of the plan is moved for every unit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvops {

// Where an index lies on one side, in bytes from the block's base: (index / page_size) * page + (index % page_size) * slot.
struct SideStrides {
    int64_t page;   // from one page to the next
    int64_t slot;   // from one token to the next within a page
    int64_t layer;  // from one layer to the next
    int64_t head;   // from one head to the next
};

// An affine piece of both caches: `layers` planes of one shape on each side. In every layer a unit has `slots` tokens
// (1 when a unit is a token, the page size when it is a page) of `heads` heads of `head_bytes` contiguous bytes.
struct Block {
    const char* src;
    char* dst;
    int64_t layers;
    int64_t slots;
    int64_t heads;
    int64_t head_bytes;
    SideStrides src_strides;
    SideStrides dst_strides;
    bool several_tensors =
        false;  // its layers come from more than one tensor: nothing else is known to hold for all of them

    int64_t unit_bytes() const { return layers * slots * heads * head_bytes; }
};

// One side's indices. `data` null means first, first + 1, first + 2, ...
struct Indices {
    const void* data = nullptr;
    int64_t first = 0;
    int64_t stride = 1;    // in elements
    bool is_64bit = true;  // int64, else int32
    int device = -1;       // the GPU that holds them, -1 for host memory

    int64_t operator[](int64_t i) const {  // host memory only
        if (data == nullptr) return first + i;
        return is_64bit ? static_cast<const int64_t*>(data)[i * stride] : static_cast<const int32_t*>(data)[i * stride];
    }

    Indices from(int64_t unit) const {  // the indices of units unit, unit + 1, ...
        Indices rest = *this;
        if (data == nullptr) {
            rest.first += unit;
        } else {
            rest.data = static_cast<const char*>(data) + unit * stride * (is_64bit ? 8 : 4);
        }
        return rest;
    }
};

// One side of the transfer: every block shares it.
struct Side {
    int device = -1;        // -1 for host memory
    int64_t page_size = 1;  // in units: the cache's page size, or 1 when a unit is a page
    int64_t limit = 0;      // indices lie in [0, limit)
    Indices indices;

    // The cache that sets the limit, for messages: its argument, and its position in the list or -1.
    const char* limit_argument = "";
    int64_t limit_element = -1;

    std::string limit_of() const {
        return limit_element < 0 ? limit_argument
                                 : std::string(limit_argument) + "[" + std::to_string(limit_element) + "]";
    }
};

struct Plan {
    const char* op = "";  // the operator's name, for messages
    bool pages = false;   // a unit is a page
    int64_t count = 0;    // units
    std::vector<Block> blocks;
    Side src;
    Side dst;

    int64_t bytes() const {
        int64_t unit = 0;
        for (const Block& block : blocks) unit += block.unit_bytes();
        return unit * count;
    }
};

}  // namespace kvops
