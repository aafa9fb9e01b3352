// Idea: a thread takes a stretch of units, merges those that follow each other on both sides into runs, a batch at a time,
// and copies each fragment of the batch's runs, asking ahead for the rows that come next. Where units are few and large, the
// threads share their fragments and, of long runs, the bytes. Bytes moved: each once in, once out. Bound by memory.
#include "copy_rows.h"

#include <algorithm>
#include <array>

#include "../runs.h"
#include "copy_bytes.h"

namespace kvops {
namespace {

constexpr int64_t kBytesWorthAThread = 64 << 10;
constexpr int64_t kBatch = 256;      // units: their runs stay in the first-level cache while all fragments use them
constexpr int64_t kFewUnits = 64;    // fewer are not shared out by units
constexpr int64_t kSlices = 16;      // of the bytes of long runs, where fragments are few too
constexpr int64_t kAhead = 4;        // rows between a prefetch and its copy

// The part [number / count) of so many bytes, cut at lines.
struct Slice {
    int64_t number, count;

    int64_t cut(int64_t bytes, int64_t at) const { return at == count ? bytes : bytes * at / count / 64 * 64; }
    int64_t begin(int64_t bytes) const { return cut(bytes, number); }
    int64_t end(int64_t bytes) const { return cut(bytes, number + 1); }
};

void copy_runs(const char* src, char* dst, const Run* runs, int64_t count, int64_t fragment_bytes, Slice slice, Stores stores) {
    for (int64_t i = 0; i < count; ++i) {
        if (i + kAhead < count) prefetch_row(src + runs[i + kAhead].src, static_cast<size_t>(fragment_bytes));
        const int64_t bytes = runs[i].units * fragment_bytes;
        const int64_t begin = slice.begin(bytes), end = slice.end(bytes);
        copy_bytes(dst + runs[i].dst + begin, src + runs[i].src + begin, static_cast<size_t>(end - begin), stores);
    }
}

constexpr Slice kWhole{0, 1};

void copy_units(const Plan& plan, const Fragments& fragments, int64_t begin, int64_t end, Stores stores) {
    std::array<Run, kBatch> runs;
    for (int64_t unit = begin; unit < end; unit += kBatch) {
        const int64_t count = merge_units(plan, fragments, unit, std::min(end, unit + kBatch), runs.data());
        each_fragment(fragments, [&](const char* src, char* dst) {
            copy_runs(src, dst, runs.data(), count, fragments.fragment_bytes, kWhole, stores);
        });
    }
}

// Fragment number `number` in the order of each_fragment.
std::pair<int64_t, int64_t> fragment_offset(const Fragments& fragments, int64_t number) {
    int64_t src = 0, dst = 0;
    for (int i = fragments.axes - 1; i >= 0; --i) {
        const FragmentAxis& axis = fragments.axis[i];
        src += number % axis.size * axis.src_stride;
        dst += number % axis.size * axis.dst_stride;
        number /= axis.size;
    }
    return {src, dst};
}

void copy_few_units(const Plan& plan, const Fragments& fragments, Stores stores, const ParallelFor& parallel_for) {
    std::array<Run, kFewUnits> runs;
    const int64_t count = merge_units(plan, fragments, 0, plan.count, runs.data());
    const int64_t run_bytes = fragments.fragment_bytes * plan.count;
    const int64_t slices = std::clamp<int64_t>(run_bytes / kBytesWorthAThread, 1, kSlices);
    const int64_t grain = std::max<int64_t>(1, kBytesWorthAThread / std::max<int64_t>(1, run_bytes / slices));
    parallel_for(0, fragments.per_unit() * slices, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const auto [src, dst] = fragment_offset(fragments, i / slices);
            copy_runs(fragments.src + src, fragments.dst + dst, runs.data(), count, fragments.fragment_bytes,
                      Slice{i % slices, slices}, stores);
        }
        finish_stores(stores);
    });
}

}  // namespace

void copy_rows(const Plan& plan, const ParallelFor& parallel_for) {
    const int64_t total = plan.bytes();
    const Stores stores = stores_for(static_cast<size_t>(total));
    for (const Block& block : plan.blocks) {
        const Fragments fragments = coalesce(block);
        const int64_t unit_bytes = std::max<int64_t>(1, block.unit_bytes());
        if (unit_bytes * plan.count <= kBytesWorthAThread) {
            copy_units(plan, fragments, 0, plan.count, stores);
            finish_stores(stores);
        } else if (plan.count <= kFewUnits) {
            copy_few_units(plan, fragments, stores, parallel_for);
        } else {
            parallel_for(0, plan.count, std::max<int64_t>(1, kBytesWorthAThread / unit_bytes), [&](int64_t begin, int64_t end) {
                copy_units(plan, fragments, begin, end, stores);
                finish_stores(stores);
            });
        }
    }
}

}  // namespace kvops
