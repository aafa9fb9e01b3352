// The SM engine. Idea: everything that a call moves is one long row of pieces (1 to 16 bytes, the widest that all addresses
// allow). A tile of pieces is a thread block's turn: each thread works out where its four pieces lie, loads all four, then
// stores them, so that a block of 1024 threads has up to 64 KiB in flight. Many threads with few pieces each beat the
// reverse: while some warps wait for the bus, others compute addresses. Bytes moved: each byte once in, once out, and 4 or 8
// bytes of index a unit, mostly from the cache.
//
// The order of pieces is the order of host addresses, as far as the indices allow: the outer loops are those with the
// larger host strides. What bounds it: the bus (host side), or the memory bandwidth (both sides on one GPU).
#include "sm_kernel.h"

#include <algorithm>
#include <array>
#include <vector>

#include "../coalesce.h"
#include "faults.h"

namespace kvops::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kPiecesPerThread = 4;
constexpr uint32_t kTile = kThreads * kPiecesPerThread;
constexpr int kMaxWalks = 4;
constexpr int kAxes = 4;                          // layers, slots, heads and the units themselves
constexpr int64_t kMaxPieces = int64_t(1) << 30;  // of one walk in one launch: piece numbers are 32-bit

// Kernel parameters carry plane addresses and, for small calls, the indices: no upload, no allocation. Two sizes, since a
// launch costs more the more parameters it has; 32764 bytes is CUDA's limit from sm_70 on.
constexpr int kSmallPayload = 2560;
constexpr int kLargePayload = 30720;

// Division by a number known before the launch, for dividends below 2^31: q = (hi32(n * multiplier) + n) >> shift, after
// Granlund and Montgomery, "Division by invariant integers using multiplication" (1994).
struct Divider {
    uint32_t divisor = 1;
    uint32_t multiplier = 1;
    uint32_t shift = 0;

    Divider() = default;
    explicit Divider(uint32_t by) : divisor(by) {
        while ((uint64_t(1) << shift) < by) ++shift;
        multiplier = static_cast<uint32_t>(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - by)) / by + 1);
    }
    __device__ uint32_t operator()(uint32_t dividend) const {
        return (__umulhi(dividend, multiplier) + dividend) >> shift;
    }
};

// How one side turns an index into bytes.
struct Addressing {
    int64_t page, slot;
    Divider page_size;     // used where the limit is below 2^31
    int64_t page_size_64;  // used elsewhere; 0: the form above
    bool linear;           // pages follow each other without a gap: no division
};

// Planes of one geometry, and how a piece's number is taken apart.
struct Walk {
    Divider pieces;  // in a fragment
    int axes;
    Divider axis[kAxes];  // sizes, innermost first
    int64_t src_stride[kAxes];
    int64_t dst_stride[kAxes];  // 0 at the axis of the units
    int unit_axis;
    Addressing src, dst;
    uint32_t first_base, bases;  // in the payload
    uint32_t total;              // pieces in this launch
    uint32_t tiles_end;          // tiles of this walk and all before it
};

struct Bases {
    const char* src;
    char* dst;
};

enum IndexKind : int { kCounting, kInt32, kInt64, kInline };

struct DeviceIndices {
    const void* data;
    int64_t stride;
    int64_t first;  // for counting
    int64_t limit;
    uint32_t inline_offset;  // bytes into the payload
    int kind;

    __device__ int64_t at(uint32_t unit, const char* payload) const {
        switch (kind) {
            case kInt32: return __ldg(static_cast<const int32_t*>(data) + unit * stride);
            case kInt64: return __ldg(static_cast<const long long*>(data) + unit * stride);
            case kInline: return reinterpret_cast<const uint32_t*>(payload + inline_offset)[unit];
            default: return first + unit;
        }
    }
    __device__ bool holds(int64_t index) const { return static_cast<uint64_t>(index) < static_cast<uint64_t>(limit); }
};

struct Reporter {
    FaultWord word;
    FaultRecord src, dst;  // all but position and value
    int64_t first_unit;    // of this launch
    bool reports;          // only the first of several launches over the same units does
};

template <int kPayload>
struct alignas(16) Launch {
    Walk walks[kMaxWalks];
    DeviceIndices src, dst, skip;
    bool skips;
    Reporter reporter;
    uint32_t tiles;
    alignas(16) char payload[kPayload];
};
static_assert(sizeof(Launch<kLargePayload>) <= 32764);
static_assert(sizeof(Launch<kSmallPayload>) <= 4096 + 512);

__device__ void report(const FaultWord& word, const FaultRecord& fault, int64_t position, int64_t value) {
    if (atomicAdd(word.count, 1u) != 0) return;
    FaultRecord* record = word.record;
    record->op = fault.op;
    record->indices = fault.indices;
    record->limit_argument = fault.limit_argument;
    record->limit_element = fault.limit_element;
    record->position = position;
    record->value = value;
    record->limit = fault.limit;
    record->pages = fault.pages;
    __threadfence_system();
    *static_cast<volatile uint32_t*>(&record->complete) = 1;
}

__device__ __noinline__ void report(const Reporter& reporter, uint32_t unit, const DeviceIndices& src,
                                    int64_t src_index, const DeviceIndices& dst, int64_t dst_index) {
    if (!reporter.reports) return;
    if (!src.holds(src_index)) report(reporter.word, reporter.src, reporter.first_unit + unit, src_index);
    if (!dst.holds(dst_index)) report(reporter.word, reporter.dst, reporter.first_unit + unit, dst_index);
}

__device__ int64_t offset_of(const Addressing& side, int64_t index) {
    if (side.linear) return index * side.page;
    if (side.page_size_64 == 0) {
        const uint32_t page = side.page_size(static_cast<uint32_t>(index));
        return page * side.page + (static_cast<uint32_t>(index) - page * side.page_size.divisor) * side.slot;
    }
    const int64_t page = index / side.page_size_64;
    return page * side.page + (index - page * side.page_size_64) * side.slot;
}

// Where a piece lies, but for the indices of its unit.
struct Place {
    int64_t src, dst;  // offsets from the base
    uint32_t base;
    uint32_t unit;
    bool first_of_unit;
};

template <class Word>
__device__ Place place_of(const Walk& walk, uint32_t piece) {
    uint32_t rest = walk.pieces(piece);
    const uint32_t within = piece - rest * walk.pieces.divisor;
    const int64_t offset = int64_t(within) * int64_t(sizeof(Word));
    Place place{offset, offset, 0, 0, within == 0};
    for (int axis = 0; axis < walk.axes; ++axis) {
        const bool outermost = axis == walk.axes - 1 && walk.bases == 1;  // what is left is the coordinate
        const uint32_t quotient = outermost ? 0 : walk.axis[axis](rest);
        const uint32_t coordinate = rest - quotient * walk.axis[axis].divisor;
        rest = quotient;
        if (axis == walk.unit_axis) {
            place.unit = coordinate;
        } else {
            place.first_of_unit &= coordinate == 0;
            place.src += coordinate * walk.src_stride[axis];
            place.dst += coordinate * walk.dst_stride[axis];
        }
    }
    place.first_of_unit &= rest == 0;
    place.base = walk.first_base + rest;
    return place;
}

// Three phases, each a loop over a thread's pieces without a branch between their loads: the loads of a phase wait together.
template <class Word, int kPayload>
__global__ void __launch_bounds__(kThreads, 1) move_pieces(const __grid_constant__ Launch<kPayload> launch) {
    for (uint32_t tile = blockIdx.x; tile < launch.tiles; tile += gridDim.x) {
        int w = 0;
        while (tile >= launch.walks[w].tiles_end) ++w;
        const Walk& walk = launch.walks[w];
        const uint32_t first = (tile - (w == 0 ? 0 : launch.walks[w - 1].tiles_end)) * kTile + threadIdx.x;

        Place place[kPiecesPerThread];
        int64_t src_index[kPiecesPerThread], dst_index[kPiecesPerThread];
        bool there[kPiecesPerThread];
#pragma unroll
        for (int i = 0; i < kPiecesPerThread; ++i) {
            const uint32_t piece = first + i * kThreads;
            there[i] = piece < walk.total;
            place[i] = place_of<Word>(walk, there[i] ? piece : 0);
            src_index[i] = launch.src.at(place[i].unit, launch.payload);
            dst_index[i] = launch.dst.at(place[i].unit, launch.payload);
        }
#pragma unroll
        for (int i = 0; i < kPiecesPerThread; ++i) {
            const bool good = launch.src.holds(src_index[i]) && launch.dst.holds(dst_index[i]);
            if (!good) {
                if (there[i] && w == 0 && place[i].first_of_unit) {
                    report(launch.reporter, place[i].unit, launch.src, src_index[i], launch.dst, dst_index[i]);
                }
                there[i] = false;
            }
        }
        if (launch.skips) {
#pragma unroll
            for (int i = 0; i < kPiecesPerThread; ++i) {
                there[i] &= launch.skip.holds(launch.skip.at(place[i].unit, launch.payload));
            }
        }

        char* to[kPiecesPerThread];
        Word data[kPiecesPerThread];
#pragma unroll
        for (int i = 0; i < kPiecesPerThread; ++i) {
            const Bases base = reinterpret_cast<const Bases*>(launch.payload)[place[i].base];
            to[i] = base.dst + place[i].dst + offset_of(walk.dst, dst_index[i]);
            const char* from = base.src + place[i].src + offset_of(walk.src, src_index[i]);
            if (there[i]) data[i] = __ldcs(reinterpret_cast<const Word*>(from));
        }
#pragma unroll
        for (int i = 0; i < kPiecesPerThread; ++i) {
            if (there[i]) __stcs(reinterpret_cast<Word*>(to[i]), data[i]);
        }
    }
}

// ---- the host's part: from blocks to launches ----

// A geometry and all bases that share it, in the order of the plan.
struct Planes {
    Walk walk;
    int word;             // bytes in a piece
    int64_t unit_pieces;  // of one base
    std::vector<Bases> bases;
};

Addressing addressing(int64_t page, int64_t slot, const Side& side) {
    Addressing result{};
    const bool linear = side.page_size == 1 || page == side.page_size * slot;
    result.linear = linear;
    result.page = linear && side.page_size != 1 ? slot : page;
    result.slot = linear ? 0 : slot;
    if (linear) return result;
    if (side.limit < (int64_t(1) << 31) && side.page_size < (int64_t(1) << 31)) {
        result.page_size = Divider(static_cast<uint32_t>(side.page_size));
    } else {
        result.page_size_64 = side.page_size;
    }
    return result;
}

int widest_word(uint64_t all_bits) {
    for (int word : {16, 8, 4, 2}) {
        if (all_bits % word == 0) return word;
    }
    return 1;
}

// Everything of a walk but its bases, and what depends on the number of units of a launch.
Planes planes_of(const Fragments& fragments, const Plan& plan) {
    Planes planes{};
    Walk& walk = planes.walk;
    walk.src = addressing(fragments.src_page, fragments.src_slot, plan.src);
    walk.dst = addressing(fragments.dst_page, fragments.dst_slot, plan.dst);
    uint64_t bits = fragments.fragment_bytes | reinterpret_cast<uint64_t>(fragments.src) |
                    reinterpret_cast<uint64_t>(fragments.dst) | walk.src.page | walk.src.slot | walk.dst.page |
                    walk.dst.slot;

    // The slow side orders the loops: the host's, or the source's where both are GPUs.
    const bool by_dst = plan.dst.device < 0;
    const Addressing& slow = by_dst ? walk.dst : walk.src;
    const int64_t unit_stride = slow.linear ? slow.page : slow.slot;
    std::array<FragmentAxis, 3> axes{};
    std::copy_n(fragments.axis, fragments.axes, axes.begin());
    std::sort(axes.begin(), axes.begin() + fragments.axes, [&](const FragmentAxis& a, const FragmentAxis& b) {
        return by_dst ? a.dst_stride < b.dst_stride : a.src_stride < b.src_stride;
    });
    walk.unit_axis = 0;
    for (int i = 0; i < fragments.axes; ++i) {
        if ((by_dst ? axes[i].dst_stride : axes[i].src_stride) < unit_stride) walk.unit_axis = i + 1;
    }
    int64_t unit_fragments = 1;
    for (int i = 0; i < fragments.axes; ++i) {
        const int axis = i < walk.unit_axis ? i : i + 1;
        walk.axis[axis] = Divider(static_cast<uint32_t>(axes[i].size));
        walk.src_stride[axis] = axes[i].src_stride;
        walk.dst_stride[axis] = axes[i].dst_stride;
        unit_fragments *= axes[i].size;
        bits |= axes[i].src_stride | axes[i].dst_stride;
    }
    walk.axes = fragments.axes + 1;
    planes.word = widest_word(bits);
    walk.pieces = Divider(static_cast<uint32_t>(fragments.fragment_bytes / planes.word));
    planes.unit_pieces = unit_fragments * (fragments.fragment_bytes / planes.word);
    planes.bases.push_back({fragments.src, fragments.dst});
    return planes;
}

bool same_geometry(const Walk& a, const Walk& b) {
    const auto same_side = [](const Addressing& s, const Addressing& t) {
        return s.page == t.page && s.slot == t.slot && s.linear == t.linear;
    };
    bool same = a.axes == b.axes && a.pieces.divisor == b.pieces.divisor && a.unit_axis == b.unit_axis &&
                same_side(a.src, b.src) && same_side(a.dst, b.dst);
    for (int axis = 0; axis < kAxes; ++axis) {
        same = same && a.axis[axis].divisor == b.axis[axis].divisor && a.src_stride[axis] == b.src_stride[axis] &&
               a.dst_stride[axis] == b.dst_stride[axis];
    }
    return same;
}

// Cuts what has more pieces in one unit than a launch can number: the longest of its extents, in two.
void cut(const Fragments& fragments, std::vector<Fragments>& pieces) {
    int64_t unit_bytes = fragments.fragment_bytes;
    int longest = -1;
    for (int i = 0; i < fragments.axes; ++i) {
        unit_bytes *= fragments.axis[i].size;
        if (longest < 0 || fragments.axis[i].size > fragments.axis[longest].size) longest = i;
    }
    if (unit_bytes <= kMaxPieces) {  // a piece is at least a byte
        pieces.push_back(fragments);
        return;
    }
    Fragments head = fragments, tail = fragments;
    if (fragments.fragment_bytes > kMaxPieces || longest < 0) {
        head.fragment_bytes = fragments.fragment_bytes / 2 / 16 * 16;
        tail.fragment_bytes -= head.fragment_bytes;
        tail.src += head.fragment_bytes;
        tail.dst += head.fragment_bytes;
    } else {
        head.axis[longest].size /= 2;
        tail.axis[longest].size -= head.axis[longest].size;
        tail.src += head.axis[longest].size * fragments.axis[longest].src_stride;
        tail.dst += head.axis[longest].size * fragments.axis[longest].dst_stride;
    }
    cut(head, pieces);
    cut(tail, pieces);
}

std::vector<Planes> group_by_geometry(const Plan& plan) {
    std::vector<Planes> groups;
    std::vector<Fragments> all;
    for (const Block& block : plan.blocks) cut(coalesce(block), all);
    for (const Fragments& fragments : all) {
        Planes planes = planes_of(fragments, plan);
        const auto known = std::find_if(groups.begin(), groups.end(), [&](const Planes& group) {
            return group.word == planes.word && same_geometry(group.walk, planes.walk);
        });
        if (known == groups.end()) {
            groups.push_back(std::move(planes));
        } else {
            known->bases.push_back(planes.bases[0]);
        }
    }
    return groups;
}

// Some bases of a group: what one launch holds of it.
struct Part {
    const Planes* planes;
    size_t begin, end;

    size_t bases() const { return end - begin; }
    int64_t unit_pieces() const { return planes->unit_pieces * static_cast<int64_t>(bases()); }
};

// One kernel launch over some units.
struct Load {
    std::vector<Part> parts;
    size_t bases = 0;
};

std::vector<Load> divide_into_loads(const std::vector<Planes>& groups, size_t max_bases) {
    std::vector<Load> loads;
    for (int word : {16, 8, 4, 2, 1}) {
        bool open = false;  // a kernel knows one word size
        for (const Planes& planes : groups) {
            if (planes.word != word) continue;
            const auto numbered = static_cast<size_t>(std::max<int64_t>(1, kMaxPieces / planes.unit_pieces));
            for (size_t begin = 0; begin < planes.bases.size();) {
                if (!open || loads.back().parts.size() == kMaxWalks || loads.back().bases == max_bases)
                    loads.emplace_back();
                open = true;
                Load& load = loads.back();
                const size_t bases = std::min({planes.bases.size() - begin, numbered, max_bases - load.bases});
                load.parts.push_back({&planes, begin, begin + bases});
                load.bases += bases;
                begin += bases;
            }
        }
    }
    return loads;
}

// The indices of one side, as the kernel will find them.
class SideIndices {
   public:
    SideIndices(const Indices& indices, int64_t limit) : indices_(indices), limit_(limit) {}

    bool on_host() const { return indices_.data != nullptr && indices_.device < 0; }
    bool fits_inline() const { return limit_ <= (int64_t(1) << 32); }

    void upload(int64_t count, const Context& context) {
        std::vector<int64_t> values(count);
        for (int64_t i = 0; i < count; ++i) values[i] = indices_[i];
        indices_ = Indices{};
        indices_.data = context.surroundings.upload(values.data(), count * 8, context.device);
        indices_.device = context.device;
    }

    // For units [unit, unit + count). Values in host memory go into the payload at `end`, which they advance.
    DeviceIndices place(int64_t unit, int64_t count, char* payload, uint32_t& end) const {
        const Indices from = indices_.from(unit);
        DeviceIndices result{from.data, from.stride, from.first, limit_, 0, kCounting};
        if (on_host()) {
            result.kind = kInline;
            result.inline_offset = end;
            auto* values = reinterpret_cast<uint32_t*>(payload + end);
            for (int64_t i = 0; i < count; ++i) values[i] = static_cast<uint32_t>(from[i]);
            end += static_cast<uint32_t>(count) * 4;
        } else if (from.data != nullptr) {
            result.kind = from.is_64bit ? kInt64 : kInt32;
        }
        return result;
    }

   private:
    Indices indices_;
    int64_t limit_;
};

FaultRecord fault_of(const Plan& plan, const char* indices, const Side& side) {
    return {plan.op, indices, side.limit_argument, side.limit_element, 0, 0, side.limit, plan.pages, 0};
}

// Without a word from the caller: the fewest blocks that saturate the link at rows of 128 bytes to 2 KiB, measured on an H200
// over PCIe Gen5: random rows written to the host need the most. Between memories of GPUs every SM counts.
int default_blocks(const Plan& plan, const Context& context) {
    if (plan.src.device < 0) return 8;
    if (plan.dst.device < 0) return 16;
    int sms = 0;
    context.check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, context.device),
                  "cudaDeviceGetAttribute");
    return sms;
}

struct Sides {
    SideIndices src, dst, skip;
    bool skips;
};

template <int kPayload>
void launch(const Plan& plan, const Context& context, const Load& load, const Sides& sides, int64_t unit, int64_t units,
            bool reports) {
    Launch<kPayload> launch;
    uint32_t bases = 0, tiles = 0;
    int walks = 0;
    for (const Part& part : load.parts) {
        std::copy(part.planes->bases.begin() + part.begin, part.planes->bases.begin() + part.end,
                  reinterpret_cast<Bases*>(launch.payload) + bases);
        Walk& walk = launch.walks[walks++];
        walk = part.planes->walk;
        walk.axis[walk.unit_axis] = Divider(static_cast<uint32_t>(units));
        walk.first_base = bases;
        walk.bases = static_cast<uint32_t>(part.bases());
        walk.total = static_cast<uint32_t>(part.unit_pieces() * units);
        tiles += (walk.total + kTile - 1) / kTile;
        walk.tiles_end = tiles;
        bases += walk.bases;
    }
    uint32_t end = bases * sizeof(Bases);
    launch.src = sides.src.place(unit, units, launch.payload, end);
    launch.dst = sides.dst.place(unit, units, launch.payload, end);
    launch.skips = sides.skips;
    if (sides.skips) launch.skip = sides.skip.place(unit, units, launch.payload, end);
    launch.reporter = {fault_word(plan.op, context.device), fault_of(plan, "src_indices", plan.src),
                       fault_of(plan, "dst_indices", plan.dst), unit, reports};
    launch.tiles = tiles;

    const int wanted = context.num_sms > 0 ? context.num_sms : default_blocks(plan, context);
    const auto blocks = std::min(static_cast<uint32_t>(wanted), tiles);
    switch (load.parts[0].planes->word) {
        case 16: move_pieces<uint4><<<blocks, kThreads, 0, context.stream>>>(launch); break;
        case 8: move_pieces<uint2><<<blocks, kThreads, 0, context.stream>>>(launch); break;
        case 4: move_pieces<unsigned int><<<blocks, kThreads, 0, context.stream>>>(launch); break;
        case 2: move_pieces<unsigned short><<<blocks, kThreads, 0, context.stream>>>(launch); break;
        default: move_pieces<unsigned char><<<blocks, kThreads, 0, context.stream>>>(launch); break;
    }
    context.check(cudaGetLastError(), "the launch of the SM kernel");
}

}  // namespace

void run_sm(const Plan& plan, const Context& context, const SkipUnits* skip) {
    Sides sides{
        {plan.src.indices, plan.src.limit}, {plan.dst.indices, plan.dst.limit}, {Indices{}, 0}, skip != nullptr};
    if (skip != nullptr) sides.skip = SideIndices(skip->indices, skip->limit);

    const std::vector<Planes> groups = group_by_geometry(plan);
    size_t all_bases = 0;
    for (const Planes& planes : groups) all_bases += planes.bases.size();

    // Indices in host memory ride in the parameters where they are few. Many are uploaded, except under capture, where a
    // replay would read the buffer again after it has been given back: there they ride in several launches.
    int64_t unit_bytes = 0;
    bool fits_inline = true;
    for (const SideIndices* side : {&sides.src, &sides.dst, &sides.skip}) {
        if (!side->on_host()) continue;
        unit_bytes += 4;
        fits_inline = fits_inline && side->fits_inline();
    }
    const size_t index_bytes = plan.count * unit_bytes;
    const bool one_launch = all_bases * sizeof(Bases) + index_bytes <= kLargePayload;
    if (!fits_inline && context.capturing) {
        fail(plan.op,
             "indices in host memory into more than 2^32 rows cannot be captured, expected indices on the GPU");
    }
    if (unit_bytes > 0 && !(fits_inline && (one_launch || context.capturing))) {
        for (SideIndices* side : {&sides.src, &sides.dst, &sides.skip}) {
            if (side->on_host()) side->upload(plan.count, context);
        }
        unit_bytes = 0;
    }

    const size_t kept_for_indices = unit_bytes == 0 ? 0 : std::min<size_t>(index_bytes, kLargePayload / 2);
    bool reports = context.reports_faults;
    for (const Load& load : divide_into_loads(groups, (kLargePayload - kept_for_indices) / sizeof(Bases))) {
        int64_t most = plan.count;
        for (const Part& part : load.parts)
            most = std::min(most, std::max<int64_t>(1, kMaxPieces / part.unit_pieces()));
        if (unit_bytes > 0) most = std::min<int64_t>(most, (kLargePayload - load.bases * sizeof(Bases)) / unit_bytes);
        for (int64_t unit = 0; unit < plan.count; unit += most) {
            const int64_t units = std::min(most, plan.count - unit);
            if (load.bases * sizeof(Bases) + units * unit_bytes <= kSmallPayload) {
                launch<kSmallPayload>(plan, context, load, sides, unit, units, reports);
            } else {
                launch<kLargePayload>(plan, context, load, sides, unit, units, reports);
            }
        }
        reports = false;
    }
}

}  // namespace kvops::cuda
