// Index values in host memory: checked, all of them, before the first byte moves.
#pragma once

#include "plan.h"

namespace kvops {

// "src_indices[3] is 17, expected 0 <= index < 16, the tokens of src_k"
std::string index_error(const char* name, int64_t position, int64_t value, int64_t limit, const std::string& limit_of,
                        bool pages);

// Fails on the first index of the side that lies outside it. Indices on a GPU are left to the kernel that uses them.
void check_index_values(const Plan& plan, const char* name, const Side& side);
void check_index_values(const Plan& plan);

}  // namespace kvops
