// Idea: the bytes of all blocks, unit after unit, form one line, and each thread takes a stretch of it. Within its
// stretch it merges units that follow each other on both sides into runs, a batch at a time, and copies each fragment
// of the batch's runs, asking ahead for the rows that come next. Bytes moved: each once in, once out. Bound by memory.
#include "copy_rows.h"

#include <algorithm>
#include <array>

#include "../runs.h"
#include "copy_bytes.h"

namespace kvops {
namespace {

constexpr int64_t kBytesWorthAThread = 64 << 10;
constexpr int64_t kLine = 64;
constexpr int64_t kBatch = 256;  // units: few enough for their runs to stay in the first-level cache
constexpr int64_t kAhead = 4;    // rows between a prefetch and its copy

void copy_runs(const char* src, char* dst, const Run* runs, int64_t count, int64_t fragment_bytes, Stores stores) {
    for (int64_t i = 0; i < count; ++i) {
        if (i + kAhead < count) prefetch_row(src + runs[i + kAhead].src, static_cast<size_t>(fragment_bytes));
        const int64_t bytes = runs[i].units * fragment_bytes;
        copy_bytes(dst + runs[i].dst, src + runs[i].src, static_cast<size_t>(bytes), stores);
    }
}

// Whether fragments of one unit lie closer together in the source than units do, as layers do in a page-first pool.
bool source_is_woven(const Plan& plan, const Fragments& fragments) {
    const int64_t unit = plan.src.page_size > 1 ? fragments.src_slot : fragments.src_page;
    return fragments.axes > 0 && fragments.axis[fragments.axes - 1].src_stride < unit;
}

void copy_units(const Plan& plan, const Fragments& fragments, int64_t begin, int64_t end, Stores stores) {
    std::array<Run, kBatch> runs;
    // A woven source is read in its own order, unit after unit, which is a third faster where the destination's rows lie
    // close to each other and no slower elsewhere. A woven destination loses by it.
    const int64_t batch = source_is_woven(plan, fragments) ? 1 : kBatch;
    for (int64_t unit = begin; unit < end; unit += batch) {
        const int64_t count = merge_units(plan, fragments, unit, std::min(end, unit + batch), runs.data());
        each_fragment(fragments, [&](const char* src, char* dst) {
            copy_runs(src, dst, runs.data(), count, fragments.fragment_bytes, stores);
        });
    }
}

// Bytes [begin, end) of one unit, its fragments one after another.
void copy_part(const Plan& plan, const Fragments& fragments, int64_t unit, int64_t begin, int64_t end, Stores stores) {
    Run run;
    merge_units(plan, fragments, unit, unit + 1, &run);
    each_fragment(fragments, [&](const char* src, char* dst) {
        const int64_t from = std::max<int64_t>(begin, 0), to = std::min(end, fragments.fragment_bytes);
        if (from < to) copy_bytes(dst + run.dst + from, src + run.src + from, static_cast<size_t>(to - from), stores);
        begin -= fragments.fragment_bytes;
        end -= fragments.fragment_bytes;
    });
}

// Bytes [begin, end) of one block, its units one after another.
void copy_stretch(const Plan& plan, const Block& block, int64_t begin, int64_t end, Stores stores) {
    const Fragments fragments = coalesce(block);
    const int64_t unit_bytes = block.unit_bytes();
    int64_t first = begin / unit_bytes;
    const int64_t last = end / unit_bytes;
    const int64_t head = begin % unit_bytes, tail = end % unit_bytes;
    if (first == last) return copy_part(plan, fragments, first, head, tail, stores);
    if (head > 0) copy_part(plan, fragments, first++, head, unit_bytes, stores);
    copy_units(plan, fragments, first, last, stores);
    if (tail > 0) copy_part(plan, fragments, last, 0, tail, stores);
}

}  // namespace

void copy_rows(const Plan& plan, const ParallelFor& parallel_for) {
    const int64_t total = plan.bytes();
    const Stores stores = stores_for(static_cast<size_t>(total));
    const auto copy = [&](int64_t begin, int64_t end) {
        // Two threads that meet within a line would write it in turns.
        begin = begin / kLine * kLine;
        if (end < total) end = end / kLine * kLine;
        for (const Block& block : plan.blocks) {
            const int64_t bytes = block.unit_bytes() * plan.count;
            const int64_t from = std::max<int64_t>(begin, 0), to = std::min(end, bytes);
            if (from < to) copy_stretch(plan, block, from, to, stores);
            begin -= bytes;
            end -= bytes;
        }
        finish_stores(stores);
    };
    if (total <= kBytesWorthAThread) {
        copy(0, total);
    } else {
        parallel_for(0, total, kBytesWorthAThread, copy);
    }
}

}  // namespace kvops
