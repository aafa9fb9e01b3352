// Units on their way through a buffer: one plan into it, one plan out of it. Staging, pageable memory, GPUs without peer
// access and moves within a pool are all this.
#pragma once

#include <cstdint>

#include "plan.h"

namespace kvops {

enum class Shape { of_src, of_dst };

// Whether the side's indices come in whole pages, each from its first token to its last: then that page size, else 1.
// Indices in host memory.
int64_t whole_page_size(const Plan& plan, const Side& side);

// Of a plan with one side in host memory: which side that is, and in what pages its indices come.
struct HostSide {
    bool is_source;
    Shape shape;
    int64_t page_size;  // that of whole_page_size
};

HostSide host_side_of(const Plan& plan);

struct Halves {
    Plan into;
    Plan out_of;
};

// Units [begin, end). Within the buffer the dimensions lie in the order in which the given side has them, without gaps, so
// that what is contiguous there is contiguous in the buffer. `page_size` is that of whole_page_size, or 1; begin and end are
// multiples of it.
Halves through_buffer(const Plan& plan, int64_t begin, int64_t end, Shape shape, int64_t page_size, char* buffer,
                      int buffer_device);

// Bytes of buffer that so many units need.
int64_t buffer_bytes(const Plan& plan, int64_t units);

// The most units, a multiple of page_size, that a buffer of about `bytes` holds; at least one page.
int64_t units_in(const Plan& plan, int64_t bytes, int64_t page_size);

}  // namespace kvops
