// Threads, lent by the caller: torch's, so that kvops takes part in torch.set_num_threads.
#pragma once

#include <cstdint>
#include <functional>

namespace kvops {

// parallel_for(begin, end, grain, work) calls work(first, last) on ranges of at least `grain` that together are [begin, end).
using ParallelWork = std::function<void(int64_t, int64_t)>;
using ParallelFor = std::function<void(int64_t, int64_t, int64_t, const ParallelWork&)>;

}  // namespace kvops
