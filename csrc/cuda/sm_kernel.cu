// The SM engine: how a plan becomes launches. What a launch does is in sm_walk.h, sm_registers.h and sm_ring.h.
//
// The order of items is the order of host addresses, as far as the indices allow: the outer loops are those with the
// larger host strides. Bytes moved: each byte once in, once out, and 4 or 8 bytes of index an item, mostly from the cache.
#include "sm_kernel.h"

#include <algorithm>
#include <array>
#include <vector>

#include "../coalesce.h"
#include "../tuning.h"
#include "faults.h"
#include "sm_registers.h"
#include "sm_ring.h"
#include "upload.h"

namespace kvops::cuda {
namespace {

constexpr int64_t kMaxPieces = int64_t(1) << 30;  // of one walk in one launch: piece numbers are 32-bit

// A geometry and all bases that share it, in the order of the plan.
struct Planes {
    Walk walk;
    int word;  // bytes in a piece
    int64_t fragment_pieces;
    int64_t unit_fragments;  // of one base
    std::vector<Bases> bases;

    int64_t unit_pieces() const { return fragment_pieces * unit_fragments; }
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
    std::stable_sort(axes.begin(), axes.begin() + fragments.axes, [&](const FragmentAxis& a, const FragmentAxis& b) {
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
    planes.fragment_pieces = fragments.fragment_bytes / planes.word;
    planes.unit_fragments = unit_fragments;
    planes.bases.push_back({fragments.src, fragments.dst});
    return planes;
}

bool same_geometry(const Walk& a, const Walk& b) {
    const auto same_side = [](const Addressing& s, const Addressing& t) {
        return s.page == t.page && s.slot == t.slot && s.linear == t.linear;
    };
    bool same = a.axes == b.axes && a.unit_axis == b.unit_axis && same_side(a.src, b.src) && same_side(a.dst, b.dst);
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
            return group.word == planes.word && group.fragment_pieces == planes.fragment_pieces &&
                   same_geometry(group.walk, planes.walk);
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
    int64_t unit_pieces() const { return planes->unit_pieces() * static_cast<int64_t>(bases()); }
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
            const auto numbered = static_cast<size_t>(std::max<int64_t>(1, kMaxPieces / planes.unit_pieces()));
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

    void upload(int64_t count, const Context& context) { indices_ = uploaded(indices_, count, context); }

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

// Without a word from the caller: the fewest blocks that saturate the link, more where pieces are narrow. Between memories
// of GPUs every SM counts.
int default_blocks(const Plan& plan, int word, const Context& context) {
    const int narrow = 16 / word;
    if (plan.src.device < 0) return static_cast<int>(tuning::load_blocks) * narrow;
    if (plan.dst.device < 0) return static_cast<int>(tuning::store_blocks) * narrow;
    int sms = 0;
    context.check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, context.device),
                  "cudaDeviceGetAttribute");
    return sms;
}

struct Sides {
    SideIndices src, dst, skip;
    bool skips;
};

// What a way of moving asks of the division into chunks and slabs.
struct Cutting {
    int warps;                              // of a block
    int64_t largest_chunk, smallest_chunk;  // pieces
    int64_t largest_slab;                   // pieces
};
constexpr Cutting kRegisterCutting{kRegisterThreads / kWarp, kRegisterChunk, kRegisterSmallestChunk,
                                   kWarp * kRegisterChunk};
constexpr Cutting kRingCutting{kRingWarps, kRingSlabBytes / 16, kWarp, kRingSlabBytes / 16};

// Chunks and slabs as large as they may be, so long as there is work for every warp.
void cut_into_slabs(Walk& walk, const Part& part, int64_t units, const Cutting& cutting, int blocks) {
    const int64_t fragment = part.planes->fragment_pieces;
    const int64_t fragments = part.planes->unit_fragments * static_cast<int64_t>(part.bases()) * units;
    const int64_t warps = int64_t(blocks) * cutting.warps;
    const int64_t share = fragments * fragment / warps;
    const int64_t most = std::clamp(share, cutting.smallest_chunk, cutting.largest_chunk);
    int64_t chunks = (fragment + most - 1) / most;
    // Chunks begin at lines of 128 bytes where the fragment does.
    const int64_t line = std::max<int64_t>(1, 128 / part.planes->word);
    const int64_t chunk = chunks == 1 ? fragment : ((fragment + chunks - 1) / chunks + line - 1) / line * line;
    chunks = (fragment + chunk - 1) / chunk;
    walk.chunks = Divider(static_cast<uint32_t>(chunks));
    walk.chunk_pieces = Divider(static_cast<uint32_t>(chunk));
    walk.last_pieces = static_cast<uint32_t>(fragment - (chunks - 1) * chunk);
    walk.items = static_cast<uint32_t>(fragments * chunks);
    const int64_t fits = std::clamp<int64_t>(cutting.largest_slab / chunk, 1, kWarp);
    walk.slab = static_cast<uint32_t>(std::clamp<int64_t>(walk.items / warps, 1, fits));
}

bool has_ring(const Context& context) {
    int major = 0;
    context.check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, context.device),
                  "cudaDeviceGetAttribute");
    return major >= 9;
}

// Both sides in the GPU's memory need no more in flight than registers hold.
bool ring_pays(const Plan& plan, const Load& load, const Context& context) {
    if (load.parts[0].planes->word != 16 || (plan.src.device >= 0 && plan.dst.device >= 0)) return false;
    const int64_t least = plan.src.device < 0 ? tuning::ring_load_bytes : tuning::ring_store_bytes;
    for (const Part& part : load.parts) {
        if (part.planes->fragment_pieces * 16 < least) return false;
    }
    return has_ring(context);
}

template <int kPayload>
void launch_ring(const Launch<kPayload>& launch, int blocks, const Context& context) {
    // For each device, and cheap where it is set already.
    context.check(cudaFuncSetAttribute(move_by_ring<kPayload>, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes),
                  "cudaFuncSetAttribute");
    move_by_ring<<<blocks, kRingWarps * kWarp, kRingBytes, context.stream>>>(launch);
}

template <int kPayload>
void launch_registers(const Launch<kPayload>& launch, int word, int blocks, const Context& context) {
    switch (word) {
        case 16: move_by_registers<uint4><<<blocks, kRegisterThreads, 0, context.stream>>>(launch); break;
        case 8: move_by_registers<uint2><<<blocks, kRegisterThreads, 0, context.stream>>>(launch); break;
        case 4: move_by_registers<unsigned int><<<blocks, kRegisterThreads, 0, context.stream>>>(launch); break;
        case 2: move_by_registers<unsigned short><<<blocks, kRegisterThreads, 0, context.stream>>>(launch); break;
        default: move_by_registers<unsigned char><<<blocks, kRegisterThreads, 0, context.stream>>>(launch); break;
    }
}

template <int kPayload>
void launch(const Plan& plan, const Context& context, const Load& load, const Sides& sides, int64_t unit, int64_t units,
            bool reports) {
    const bool ring = ring_pays(plan, load, context);
    const Cutting& cutting = ring ? kRingCutting : kRegisterCutting;
    const int word = load.parts[0].planes->word;
    const int wanted = context.num_sms > 0 ? context.num_sms : default_blocks(plan, word, context);
    Launch<kPayload> launch;
    uint32_t bases = 0;
    int walks = 0;
    launch.slabs = 0;
    for (const Part& part : load.parts) {
        std::copy(part.planes->bases.begin() + part.begin, part.planes->bases.begin() + part.end,
                  reinterpret_cast<Bases*>(launch.payload) + bases);
        Walk& walk = launch.walks[walks++];
        walk = part.planes->walk;
        walk.axis[walk.unit_axis] = Divider(static_cast<uint32_t>(units));
        walk.first_base = bases;
        walk.bases = static_cast<uint32_t>(part.bases());
        cut_into_slabs(walk, part, units, cutting, wanted);
        launch.slabs += (walk.items + walk.slab - 1) / walk.slab;
        walk.slabs_end = launch.slabs;
        bases += walk.bases;
    }
    uint32_t end = bases * sizeof(Bases);
    launch.src = sides.src.place(unit, units, launch.payload, end);
    launch.dst = sides.dst.place(unit, units, launch.payload, end);
    launch.skips = sides.skips;
    if (sides.skips) launch.skip = sides.skip.place(unit, units, launch.payload, end);
    launch.reporter = {fault_word(plan.op, context.device), fault_of(plan, "src_indices", plan.src),
                       fault_of(plan, "dst_indices", plan.dst), unit, reports};

    const auto blocks = static_cast<int>(std::min(static_cast<uint32_t>(wanted), launch.slabs));
    if (ring) {
        launch_ring(launch, blocks, context);
    } else {
        launch_registers(launch, word, blocks, context);
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
