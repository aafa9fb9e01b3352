// A plan as plain copies: runs of bytes that are contiguous on both sides, consecutive units merged where they follow each
// other. All indices in host memory.
#pragma once

#include <vector>

#include "coalesce.h"
#include "plan.h"

namespace kvops {

// Consecutive units whose fragments follow each other without a gap on both sides: offsets of the first, and how many.
struct Run {
    int64_t src, dst, units;
};

inline int64_t offset_of(const Side& side, int64_t index, int64_t page, int64_t slot) {
    if (side.page_size == 1) return index * page;
    return index / side.page_size * page + index % side.page_size * slot;
}

// Writes the runs of units [begin, end), at most one a unit, and returns how many they are.
inline int64_t merge_units(const Plan& plan, const Fragments& fragments, int64_t begin, int64_t end, Run* runs) {
    int64_t count = 0;
    for (int64_t i = begin; i < end; ++i) {
        const int64_t src = offset_of(plan.src, plan.src.indices[i], fragments.src_page, fragments.src_slot);
        const int64_t dst = offset_of(plan.dst, plan.dst.indices[i], fragments.dst_page, fragments.dst_slot);
        if (count > 0) {
            Run& last = runs[count - 1];
            const int64_t extent = last.units * fragments.fragment_bytes;
            if (src == last.src + extent && dst == last.dst + extent) {
                ++last.units;
                continue;
            }
        }
        runs[count++] = {src, dst, 1};
    }
    return count;
}

inline std::vector<Run> merge_units(const Plan& plan, const Fragments& fragments) {
    std::vector<Run> runs(static_cast<size_t>(plan.count));
    runs.resize(static_cast<size_t>(merge_units(plan, fragments, 0, plan.count, runs.data())));
    return runs;
}

// Visits (src, dst, bytes): each byte of the plan once.
template <class Visit>
void each_run(const Plan& plan, const Visit& visit) {
    for (const Block& block : plan.blocks) {
        const Fragments fragments = coalesce(block);
        const std::vector<Run> runs = merge_units(plan, fragments);
        each_fragment(fragments, [&](const char* src, char* dst) {
            for (const Run& run : runs) visit(src + run.src, dst + run.dst, run.units * fragments.fragment_bytes);
        });
    }
}

// The number of runs that each_run visits.
inline int64_t count_runs(const Plan& plan) {
    int64_t count = 0;
    for (const Block& block : plan.blocks) {
        const Fragments fragments = coalesce(block);
        count += static_cast<int64_t>(merge_units(plan, fragments).size()) * fragments.per_unit();
    }
    return count;
}

}  // namespace kvops
