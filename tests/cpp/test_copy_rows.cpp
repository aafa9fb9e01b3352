// The CPU engine against moving one byte after another, on random plans; coalesce.h on geometries whose answer is
// known.
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

#include "check.h"
#include "coalesce.h"
#include "cpu/copy_bytes.h"
#include "cpu/copy_rows.h"

using namespace kvops;

namespace {

void run_inline(int64_t begin, int64_t end, int64_t, const ParallelWork& work) { work(begin, end); }

void run_in_threads(int64_t begin, int64_t end, int64_t, const ParallelWork& work) {
    const int64_t middle = begin + (end - begin) / 2;
    std::thread other([&] { work(middle, end); });
    work(begin, middle);
    other.join();
}

// A side of a random plan: memory, and where rows lie in it.
struct Pool {
    std::vector<char> bytes;
    SideStrides strides;
};

// [pages, page_size, layers, heads, head_bytes] with the axes before the last in any order, with or without gaps.
Pool random_pool(Random& random, int64_t pages, int64_t page_size, const Block& block, bool may_repeat) {
    struct Axis {
        int64_t size;
        int64_t SideStrides::* stride;
    };
    std::array<Axis, 4> axes{{{pages, &SideStrides::page},
                              {page_size, &SideStrides::slot},
                              {block.layers, &SideStrides::layer},
                              {block.heads, &SideStrides::head}}};
    const bool natural = random.one_in(3);  // pages outermost, heads innermost
    if (!natural) {
        for (size_t i = 4; i > 1; --i)
            std::swap(axes[i - 1], axes[static_cast<size_t>(random.between(0, static_cast<int64_t>(i) - 1))]);
    }
    const bool gaps = random.one_in(2);
    Pool pool;
    int64_t extent = block.head_bytes, reach = block.head_bytes;
    for (size_t i = 4; i-- > 0;) {
        int64_t stride = extent + (gaps && random.one_in(2) ? random.between(0, 70) : 0);
        if (may_repeat && random.one_in(12)) stride = 0;          // an expanded source
        if (axes[i].size == 1) stride = random.between(0, 1000);  // means nothing
        pool.strides.*axes[i].stride = stride;
        reach += (axes[i].size - 1) * stride;
        if (axes[i].size > 1) extent = std::max(extent, axes[i].size * stride);
    }
    pool.bytes.resize(static_cast<size_t>(reach));
    for (char& byte : pool.bytes) byte = static_cast<char>(random.between(0, 255));
    return pool;
}

// `count` indices below the limit: stretches that ascend, as pages do, between random ones. No index twice if
// `distinct`.
std::vector<int64_t> random_indices(Random& random, int64_t count, int64_t limit, bool distinct) {
    std::vector<int64_t> indices;
    std::vector<bool> used(static_cast<size_t>(limit));
    while (static_cast<int64_t>(indices.size()) < count) {
        int64_t next = random.between(0, limit - 1);
        int64_t length = random.one_in(2) ? 1 : random.between(1, 40);
        while (distinct && used[static_cast<size_t>(next)]) next = (next + 1) % limit;
        for (; length > 0 && next < limit && static_cast<int64_t>(indices.size()) < count; ++next, --length) {
            if (distinct && used[static_cast<size_t>(next)]) break;
            used[static_cast<size_t>(next)] = true;
            indices.push_back(next);
        }
    }
    return indices;
}

// The memory of index tensors, kept while the plan uses it.
struct StoredIndices {
    std::vector<int32_t> narrow;
    std::vector<int64_t> wide;

    Indices store(Random& random, const std::vector<int64_t>& values) {
        Indices indices;
        indices.stride = random.one_in(3) ? random.between(2, 3) : 1;
        indices.is_64bit = random.one_in(2);
        const size_t stride = static_cast<size_t>(indices.stride);
        wide.assign(values.size() * stride, -1);
        for (size_t i = 0; i < values.size(); ++i) wide[i * stride] = values[i];
        narrow.assign(wide.begin(), wide.end());
        indices.data = indices.is_64bit ? static_cast<const void*>(wide.data()) : narrow.data();
        return indices;
    }
};

int64_t address(const Side& side, const SideStrides& strides, int64_t index, int64_t layer, int64_t slot,
                int64_t head) {
    return index / side.page_size * strides.page + index % side.page_size * strides.slot + layer * strides.layer +
           slot * strides.slot + head * strides.head;
}

// What the plan does to `dst`, which stands for the memory at block.dst.
void move_byte_by_byte(const Plan& plan, const Block& block, const std::vector<int64_t>& src_indices,
                       const std::vector<int64_t>& dst_indices, std::vector<char>& dst) {
    for (int64_t i = 0; i < plan.count; ++i) {
        for (int64_t layer = 0; layer < block.layers; ++layer) {
            for (int64_t slot = 0; slot < block.slots; ++slot) {
                for (int64_t head = 0; head < block.heads; ++head) {
                    const int64_t from = address(plan.src, block.src_strides, src_indices[i], layer, slot, head);
                    const int64_t to = address(plan.dst, block.dst_strides, dst_indices[i], layer, slot, head);
                    for (int64_t byte = 0; byte < block.head_bytes; ++byte) dst[to + byte] = block.src[from + byte];
                }
            }
        }
    }
}

// The pieces that blocks move for a unit of index 0: (src, dst) of each contiguous byte.
std::multiset<std::pair<const char*, const char*>> bytes_of(const Block& block) {
    std::multiset<std::pair<const char*, const char*>> bytes;
    for (int64_t layer = 0; layer < block.layers; ++layer) {
        for (int64_t slot = 0; slot < block.slots; ++slot) {
            for (int64_t head = 0; head < block.heads; ++head) {
                const char* src = block.src + layer * block.src_strides.layer + slot * block.src_strides.slot +
                                  head * block.src_strides.head;
                const char* dst = block.dst + layer * block.dst_strides.layer + slot * block.dst_strides.slot +
                                  head * block.dst_strides.head;
                for (int64_t i = 0; i < block.head_bytes; ++i) bytes.emplace(src + i, dst + i);
            }
        }
    }
    return bytes;
}

std::multiset<std::pair<const char*, const char*>> bytes_of(const Fragments& fragments) {
    std::multiset<std::pair<const char*, const char*>> bytes;
    each_fragment(fragments, [&](const char* src, const char* dst) {
        for (int64_t i = 0; i < fragments.fragment_bytes; ++i) bytes.emplace(src + i, dst + i);
    });
    return bytes;
}

void test_random_plans() {
    Random random(1);
    int shared_out = 0;
    for (int round = 0; round < 400; ++round) {
        Plan plan;
        plan.op = "test";
        plan.pages = random.one_in(3);
        const int64_t page_size = random.one_in(3) ? 1 : random.between(2, 16);
        const int64_t dst_page_size = plan.pages || random.one_in(2) ? page_size : random.between(1, 16);
        const int64_t src_pages = random.between(1, 60), dst_pages = random.between(1, 60);
        plan.src.page_size = plan.pages ? 1 : page_size;
        plan.dst.page_size = plan.pages ? 1 : dst_page_size;
        plan.src.limit = plan.pages ? src_pages : src_pages * page_size;
        plan.dst.limit = plan.pages ? dst_pages : dst_pages * dst_page_size;
        const int64_t most = std::min(plan.src.limit, plan.dst.limit);
        plan.count = random.one_in(3) ? most : random.between(0, most);

        std::vector<int64_t> src_indices = random_indices(random, plan.count, plan.src.limit, false);
        std::vector<int64_t> dst_indices = random_indices(random, plan.count, plan.dst.limit, true);
        if (random.one_in(4)) dst_indices = src_indices = random_indices(random, plan.count, most, true);
        const bool src_given = !random.one_in(4), dst_given = !random.one_in(4);
        if (src_given && dst_given && plan.count > 1 && random.one_in(4)) {
            // The same move twice: whichever is last, the result is the same.
            src_indices[0] = src_indices[plan.count - 1];
            dst_indices[0] = dst_indices[plan.count - 1];
        }
        StoredIndices src_memory, dst_memory;
        plan.src.indices = src_memory.store(random, src_indices);
        plan.dst.indices = dst_memory.store(random, dst_indices);
        const auto count_up = [&](Side& side, std::vector<int64_t>& indices) {
            side.indices = Indices{};
            side.indices.first = random.between(0, side.limit - plan.count);
            std::iota(indices.begin(), indices.end(), side.indices.first);
        };
        if (!src_given) count_up(plan.src, src_indices);
        if (!dst_given) count_up(plan.dst, dst_indices);

        std::vector<Pool> src, dst;
        for (int64_t blocks = random.between(1, 3); blocks > 0; --blocks) {
            Block block{};
            block.layers = random.between(1, 4);
            block.slots = plan.pages ? page_size : 1;
            block.heads = random.between(1, 3);
            block.head_bytes = random.one_in(2) ? 64 * random.between(1, 5) : random.between(1, 300);
            src.push_back(random_pool(random, src_pages, page_size, block, true));
            dst.push_back(random_pool(random, dst_pages, dst_page_size, block, false));
            block.src = src.back().bytes.data();
            block.dst = dst.back().bytes.data();
            block.src_strides = src.back().strides;
            block.dst_strides = dst.back().strides;
            plan.blocks.push_back(block);
        }
        std::vector<std::vector<char>> expected;
        for (size_t i = 0; i < plan.blocks.size(); ++i) {
            expected.push_back(dst[i].bytes);
            move_byte_by_byte(plan, plan.blocks[i], src_indices, dst_indices, expected.back());
            check(bytes_of(coalesce(plan.blocks[i])) == bytes_of(plan.blocks[i]), "round " << round << ", block " << i);
        }

        // In stretches of any length, which need not fall on rows or lines.
        const auto run_in_stretches = [&](int64_t begin, int64_t end, int64_t, const ParallelWork& work) {
            while (begin < end) {
                const int64_t next = std::min(end, begin + random.between(1, std::max<int64_t>(1, end / 4)));
                work(begin, next);
                begin = next;
                ++shared_out;
            }
        };
        const ParallelFor ways[] = {run_inline, run_in_threads, run_in_stretches};
        copy_rows(plan, ways[random.between(0, 2)]);
        for (size_t i = 0; i < plan.blocks.size(); ++i) {
            const auto differs = std::mismatch(expected[i].begin(), expected[i].end(), dst[i].bytes.begin());
            check(differs.first == expected[i].end(),
                  "round " << round << ", block " << i << ", byte " << differs.first - expected[i].begin());
        }
    }
    check(shared_out > 100, shared_out);
}

// Large enough for streaming stores, rows of odd lengths at odd addresses.
void test_large_transfer() {
    Random random(2);
    for (const int64_t row : {1000, 1024, 4099}) {
        const int64_t rows = (int64_t{72} << 20) / row;
        std::vector<char> src(static_cast<size_t>(rows * row)), dst(src.size() + 1);
        for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<char>(i * 31 + i / 251);
        const std::vector<int64_t> src_indices = random_indices(random, rows / 2, rows, false);
        const std::vector<int64_t> dst_indices = random_indices(random, rows / 2, rows, true);
        Plan plan;
        plan.count = rows / 2;
        plan.src.limit = plan.dst.limit = rows;
        plan.src.indices.data = src_indices.data();
        plan.dst.indices.data = dst_indices.data();
        const SideStrides strides{row, row, 0, 0};
        plan.blocks.push_back(Block{src.data(), dst.data() + 1, 1, 1, 1, row, strides, strides});
        copy_rows(plan, run_in_threads);
        std::vector<bool> written(static_cast<size_t>(rows));
        for (int64_t i = 0; i < plan.count; ++i) {
            check(std::memcmp(dst.data() + 1 + dst_indices[i] * row, src.data() + src_indices[i] * row, row) == 0,
                  row << ", unit " << i);
            written[dst_indices[i]] = true;
        }
        for (int64_t i = 0; i < rows; ++i) {
            const char* begin = dst.data() + 1 + i * row;
            check(written[i] || std::all_of(begin, begin + row, [](char byte) { return byte == 0; }),
                  row << ", row " << i);
        }
    }
}

void test_copy_bytes() {
    Random random(3);
    std::vector<char> src(3000), dst(3000);
    for (char& byte : src) byte = static_cast<char>(random.between(1, 255));
    for (const Stores stores : {Stores::cached, Stores::streaming}) {
        for (int round = 0; round < 5000; ++round) {
            const int64_t bytes = random.between(0, 2000), from = random.between(0, 900), to = random.between(0, 900);
            std::fill(dst.begin(), dst.end(), 0);
            copy_bytes(dst.data() + to, src.data() + from, static_cast<size_t>(bytes), stores);
            finish_stores(stores);
            std::vector<char> expected(3000);
            std::copy_n(src.begin() + from, bytes, expected.begin() + to);
            check(dst == expected, bytes << " bytes from " << from << " to " << to);
        }
    }
}

// A run of one unit is work for all threads: half of the stretches move half of the bytes, of all blocks together.
void test_one_unit_is_shared_out() {
    constexpr int64_t kUnit = 1 << 20;
    const std::vector<char> src(2 * kUnit, 'x');
    std::vector<char> dst(2 * kUnit, ' ');
    Plan plan;
    plan.count = 1;
    const SideStrides strides{kUnit, 0, 0, 0};
    for (int64_t i : {0, 1})
        plan.blocks.push_back(Block{src.data() + i * kUnit, dst.data() + i * kUnit, 1, 1, 1, kUnit, strides, strides});
    const auto first_quarter = [](int64_t begin, int64_t end, int64_t, const ParallelWork& work) {
        work(begin, begin + (end - begin) / 4);
    };
    copy_rows(plan, first_quarter);
    check(std::count(dst.begin(), dst.end(), 'x') == kUnit / 2, std::count(dst.begin(), dst.end(), 'x'));
    const auto second_half = [](int64_t begin, int64_t end, int64_t, const ParallelWork& work) {
        work(begin + (end - begin) / 2, end);
    };
    copy_rows(plan, second_half);
    check(std::count(dst.begin(), dst.end(), 'x') == kUnit * 3 / 2, std::count(dst.begin(), dst.end(), 'x'));
}

void test_small_transfer_uses_no_threads() {
    std::vector<char> src(4096, 'x'), dst(4096);
    Plan plan;
    plan.count = 4;
    plan.blocks.push_back(Block{src.data(), dst.data(), 1, 1, 1, 1024, {1024, 0, 0, 0}, {1024, 0, 0, 0}});
    copy_rows(plan, [](int64_t, int64_t, int64_t, const ParallelWork&) { check(false, "threads for 4 KiB"); });
    check(dst == src, "4 KiB");
}

std::ostream& operator<<(std::ostream& out, const Fragments& fragments) {
    out << fragments.fragment_bytes << " bytes";
    for (int i = 0; i < fragments.axes; ++i) {
        const FragmentAxis& axis = fragments.axis[i];
        out << ", " << axis.size << " x (" << axis.src_stride << ", " << axis.dst_stride << ")";
    }
    return out;
}

void test_coalesce() {
    char* const dst = nullptr;
    const auto expect = [&](const Block& block, int64_t fragment_bytes, std::vector<FragmentAxis> axes) {
        const Fragments found = coalesce(block);
        bool same = found.fragment_bytes == fragment_bytes && found.axes == static_cast<int>(axes.size());
        for (int i = 0; same && i < found.axes; ++i) {
            const FragmentAxis &a = found.axis[i], &b = axes[static_cast<size_t>(i)];
            same = a.size == b.size && a.src_stride == b.src_stride && a.dst_stride == b.dst_stride;
        }
        check(same, found);
    };
    // 4 layers, 16 slots, 8 heads of 256 bytes; strides are page, slot, layer, head.
    const SideStrides layer_first{32768, 2048, 1 << 20, 256}, direct{131072, 2048, 32768, 256},
        page_first{131072, 8192, 2048, 256};
    const SideStrides heads_first{32768, 256, 1 << 20, 4096};
    const auto pages = [&](SideStrides src, SideStrides dst_strides) {
        return Block{nullptr, dst, 4, 16, 8, 256, src, dst_strides};
    };
    expect(pages(direct, direct), 131072, {});
    expect(pages(page_first, page_first), 131072, {});
    expect(pages(layer_first, direct), 32768, {{4, 1 << 20, 32768}});
    expect(pages(layer_first, page_first), 2048, {{4, 1 << 20, 2048}, {16, 2048, 8192}});
    expect(pages(layer_first, heads_first), 256, {{4, 1 << 20, 1 << 20}, {16, 2048, 256}, {8, 256, 4096}});
    expect(pages(heads_first, heads_first), 32768, {{4, 1 << 20, 1 << 20}});
    // A token: one slot, whose stride says nothing about the unit.
    expect(Block{nullptr, dst, 4, 1, 8, 256, page_first, page_first}, 8192, {});
    expect(Block{nullptr, dst, 1, 1, 8, 256, layer_first, page_first}, 2048, {});
    // Layers and slots continue each other on both sides, with a gap after each row.
    expect(Block{nullptr, dst, 4, 16, 8, 256, {0, 3000, 48000, 256}, {0, 4000, 64000, 256}}, 2048, {{64, 3000, 4000}});
    // A source that repeats its layers leaves the heads in one piece.
    expect(Block{nullptr, dst, 4, 1, 8, 256, {2048, 0, 0, 256}, page_first}, 2048, {{4, 0, 2048}});
}

std::multiset<std::tuple<const char*, const char*, int64_t, int64_t>> layers_of(const std::vector<Block>& blocks) {
    std::multiset<std::tuple<const char*, const char*, int64_t, int64_t>> layers;
    for (const Block& block : blocks) {
        for (int64_t i = 0; i < block.layers; ++i) {
            layers.emplace(block.src + i * block.src_strides.layer, block.dst + i * block.dst_strides.layer,
                           block.src_strides.slot, block.dst_strides.slot);
        }
    }
    return layers;
}

void test_fuse() {
    // Blocks of some layers each, at offsets in memory that is never touched; layers of single-layer blocks have no
    // stride.
    const auto block = [](int64_t src, int64_t dst, int64_t layers = 1, int64_t src_step = 77, int64_t dst_step = 99) {
        return Block{reinterpret_cast<const char*>(uintptr_t{1} << 32) + src,
                     reinterpret_cast<char*>(uintptr_t{1} << 33) + dst,
                     layers,
                     1,
                     2,
                     64,
                     {4096, 128, src_step, 64},
                     {4096, 128, dst_step, 64}};
    };
    const auto expect = [&](const std::vector<Block>& blocks, size_t count) {
        const std::vector<Block> fused = fuse(blocks);
        check(fused.size() == count, fused.size() << " blocks of " << blocks.size());
        check(layers_of(fused) == layers_of(blocks), count << " blocks expected");
        for (const Block& stack : fused)
            check(stack.several_tensors == (count < blocks.size()), count << " blocks expected");
    };
    expect({}, 0);
    expect({block(0, 0)}, 1);
    expect({block(0, 0), block(1000, 5000), block(2000, 10000), block(3000, 15000)}, 1);
    expect({block(3000, 15000), block(2000, 10000), block(1000, 5000), block(0, 0)},
           1);  // downwards
    expect({block(0, 10000), block(1000, 5000), block(2000, 0)},
           3);  // up here, down there
    expect({block(0, 0, 3, 1000, 5000), block(3000, 15000), block(4000, 20000, 2, 1000, 5000)}, 1);
    expect({block(0, 0, 3, 1000, 5000), block(3000, 15001)}, 2);
    expect({block(0, 0), block(1000, 5000, 2, 1000, 5001)}, 2);
    std::vector<Block> other_slots{block(0, 0), block(1000, 5000)};
    other_slots[1].src_strides.slot = 256;
    expect(other_slots, 2);
    std::vector<Block> other_heads{block(0, 0), block(1000, 5000)};
    other_heads[1].head_bytes = 32;
    expect(other_heads, 2);
    // Two pools, one after the other.
    const std::vector<Block> two = fuse({block(0, 0), block(1000, 5000), block(90000, 90000), block(91000, 95000)});
    check(two.size() == 2 && two[0].layers == 2 && two[1].layers == 2, two.size());
}

}  // namespace

int main() {
    test_coalesce();
    test_fuse();
    test_copy_bytes();
    test_small_transfer_uses_no_threads();
    test_one_unit_is_shared_out();
    test_random_plans();
    test_large_transfer();
    std::cout << "test_copy_rows: ok\n";
}
