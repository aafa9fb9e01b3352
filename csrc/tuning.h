// Every number that was found by measuring, in one place. benchmarks/tune.py measures again, and sets them for that through
// kvops_tune in library.cpp; nothing else does. Found on an H200 over PCIe Gen5; benchmarks/results/tuning.json has the curves.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvops {

struct Tuned {
    const char* name;
    std::atomic<int64_t> value;

    operator int64_t() const { return value.load(std::memory_order_relaxed); }
};

namespace tuning {

// Engines (engine.cpp). Average bytes that are contiguous: for the copy engine on both sides, for the staged one in host
// memory; and the least that a transfer must move in all.
inline Tuned copy_run_bytes{"copy_run_bytes", 256 << 10};
inline Tuned copy_total_bytes{"copy_total_bytes", 1 << 20};
inline Tuned staged_run_bytes{"staged_run_bytes", 128 << 10};
inline Tuned staged_total_bytes{"staged_total_bytes", 16 << 20};

// The copy engine: average bytes of a copy from which on copies are spread over several streams.
inline Tuned spread_run_bytes{"spread_run_bytes", 32 << 10};

// The staged engine. Small enough for the first and the last chunk, which nothing hides, to count little.
inline Tuned staged_chunk_bytes{"staged_chunk_bytes", 4 << 20};

// The SM kernel: blocks, one to an SM, that saturate the link where pieces have 16 bytes; and the fragments from which on
// they pass through shared memory instead of registers.
inline Tuned load_blocks{"load_blocks", 2};
inline Tuned store_blocks{"store_blocks", 2};
inline Tuned ring_load_bytes{"ring_load_bytes", 1 << 10};
inline Tuned ring_store_bytes{"ring_store_bytes", int64_t(1) << 62};  // never: stores gain nothing

}  // namespace tuning

inline Tuned* const all_tuned[] = {&tuning::copy_run_bytes,     &tuning::copy_total_bytes, &tuning::staged_run_bytes,
                                   &tuning::staged_total_bytes, &tuning::spread_run_bytes, &tuning::staged_chunk_bytes,
                                   &tuning::load_blocks,        &tuning::store_blocks,     &tuning::ring_load_bytes,
                                   &tuning::ring_store_bytes};

}  // namespace kvops
