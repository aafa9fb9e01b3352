// overlap.h against marking every byte, on small random sets; and the geometries of real pools, far too large to mark,
// whose answers are known and must come quickly.
#include <algorithm>
#include <chrono>
#include <vector>

#include "check.h"
#include "overlap.h"

using kvops::ByteSet;
using kvops::first_shared;
using kvops::may_share_bytes;
using kvops::overlaps_itself;

namespace {

struct Axis {
    int64_t size, stride;
};

// A set as the test knows it: where it begins in an imagined memory, its axes, its contiguous bytes.
struct Shape {
    int64_t begin;
    std::vector<Axis> axes;
    int64_t bytes;

    ByteSet set() const {
        // Addresses are compared and subtracted, never read.
        ByteSet set(reinterpret_cast<const char*>(uintptr_t{1} << 40) + begin, bytes);
        for (const Axis& axis : axes) set.add(axis.size, axis.stride);
        return set;
    }

    // How often each byte of the memory is in the set.
    std::vector<int> marks() const {
        std::vector<int64_t> starts{begin};
        for (const Axis& axis : axes) {
            std::vector<int64_t> stepped;
            for (int64_t start : starts) {
                for (int64_t i = 0; i < axis.size; ++i) stepped.push_back(start + i * axis.stride);
            }
            starts = stepped;
        }
        std::vector<int> marks;
        for (int64_t start : starts) {
            for (int64_t i = start; i < start + bytes; ++i) {
                if (i >= static_cast<int64_t>(marks.size())) marks.resize(static_cast<size_t>(i) + 1);
                ++marks[static_cast<size_t>(i)];
            }
        }
        return marks;
    }
};

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
    out << "[at " << shape.begin;
    for (const Axis& axis : shape.axes) out << ", " << axis.size << " x " << axis.stride;
    return out << ", " << shape.bytes << " bytes]";
}

bool meet(const std::vector<int>& a, const std::vector<int>& b) {
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
        if (a[i] > 0 && b[i] > 0) return true;
    }
    return false;
}

Shape random_shape(Random& random) {
    Shape shape{random.between(0, 40), {}, random.one_in(20) ? 0 : random.between(1, 6)};
    if (random.one_in(4)) {
        // Strides that divide one another, as those of paged and unpaged views do, and steps enough to fill their gaps.
        for (int64_t n = random.between(1, 3); n > 0; --n) {
            const int64_t strides[] = {1, 2, 4, 6, 8, 12, 16, 24, 48};
            shape.axes.push_back({random.between(1, 8), strides[random.between(0, 8)]});
        }
        shape.bytes = random.between(1, 2);
        return shape;
    }
    const int64_t axes = random.between(0, 5);
    int64_t extent = shape.bytes;
    for (int64_t i = 0; i < axes; ++i) {
        // As a tensor has them most of the time: each axis beyond the one before it, with or without a gap.
        const int64_t size = random.one_in(30) ? 0 : random.between(1, 3);
        const int64_t stride =
            random.one_in(4) ? random.between(0, 12) : extent + random.one_in(2) * random.between(0, 9);
        shape.axes.push_back({size, stride});
        extent = std::max(extent, size * stride);
    }
    for (size_t i = shape.axes.size(); i > 1; --i) {
        std::swap(shape.axes[i - 1], shape.axes[static_cast<size_t>(random.between(0, static_cast<int64_t>(i) - 1))]);
    }
    return shape;
}

void test_pairs_against_marks() {
    Random random(1);
    int disjoint_within_range = 0, shared = 0;
    for (int i = 0; i < 20000; ++i) {
        Shape a = random_shape(random), b = random_shape(random);
        if (random.one_in(2)) b.axes = a.axes;  // two views of one pool
        const bool expected = meet(a.marks(), b.marks());
        check(may_share_bytes(a.set(), b.set()) == expected, a << " and " << b);
        check(may_share_bytes(b.set(), a.set()) == expected, b << " and " << a);
        shared += expected;
        const ByteSet x = a.set(), y = b.set();
        disjoint_within_range +=
            !expected && !x.empty() && !y.empty() && x.first() <= y.last() && y.first() <= x.last();
    }
    check(shared > 1000 && disjoint_within_range > 1000, shared << " shared, " << disjoint_within_range << " woven");
}

void test_self_against_marks() {
    Random random(2);
    int found = 0;
    for (int i = 0; i < 20000; ++i) {
        const Shape shape = random_shape(random);
        const std::vector<int> marks = shape.marks();
        const bool expected = std::any_of(marks.begin(), marks.end(), [](int count) { return count > 1; });
        check(overlaps_itself(shape.set()) == expected, shape);
        found += expected;
    }
    check(found > 1000 && found < 19000, found);
}

void test_first_shared_against_pairs() {
    Random random(3);
    int found = 0;
    for (int i = 0; i < 3000; ++i) {
        std::vector<ByteSet> a, b;
        for (int64_t n = random.between(0, 6); n > 0; --n) {
            Shape shape = random_shape(random);
            shape.begin = random.between(0, 300);
            (random.one_in(2) ? a : b).push_back(shape.set());
        }
        bool expected = false, expected_within = false;
        for (size_t j = 0; j < a.size(); ++j) {
            for (const ByteSet& other : b) expected |= may_share_bytes(a[j], other);
            for (size_t k = 0; k < j; ++k) expected_within |= may_share_bytes(a[j], a[k]);
        }
        const auto pair = first_shared(a, b);
        check(pair.has_value() == expected, "case " << i);
        check(!pair || may_share_bytes(a[pair->first], b[pair->second]), "case " << i);
        const auto within = first_shared(a);
        check(within.has_value() == expected_within, "case " << i);
        check(!within || (within->first < within->second && may_share_bytes(a[within->first], a[within->second])),
              "case " << i);
        found += expected;
    }
    check(found > 300 && found < 2700, found);
}

// Pools of a million pages of 16 tokens, 32 layers, 8 heads of 128 two-byte elements, described in bytes.
constexpr int64_t kPages = 1000000, kPageSize = 16, kLayers = 32, kHeads = 8, kHead = 256, kRow = kHeads * kHead;

// One layer of a pool [pages, page_size, layers, heads, head_dim].
Shape page_first(int64_t layer) {
    return {layer * kRow, {{kPages, kPageSize * kLayers * kRow}, {kPageSize, kLayers * kRow}, {kHeads, kHead}}, kHead};
}

// The same pool by tokens, without pages.
Shape page_first_tokens(int64_t layer) {
    return {layer * kRow, {{kPages * kPageSize, kLayers * kRow}, {kHeads, kHead}}, kHead};
}

// One layer of a pool [pages, layers, page_size, heads, head_dim].
Shape page_first_direct(int64_t layer) {
    return {
        layer * kPageSize * kRow, {{kPages, kLayers * kPageSize * kRow}, {kPageSize, kRow}, {kHeads, kHead}}, kHead};
}

// One layer of a pool [pages, heads, page_size, layers, head_dim].
Shape page_head(int64_t layer) {
    return {layer * kHead,
            {{kPages, kHeads * kPageSize * kLayers * kHead},
             {kPageSize, kLayers * kHead},
             {kHeads, kPageSize * kLayers * kHead}},
            kHead};
}

// K (0) or V (1) of one layer of [pages, layers, 2, page_size, heads, head_dim].
Shape interleaved(int64_t layer, int64_t which) {
    return {(layer * 2 + which) * kPageSize * kRow,
            {{kPages, kLayers * 2 * kPageSize * kRow}, {kPageSize, kRow}, {kHeads, kHead}},
            kHead};
}

// Heads [first, first + heads) of [pages, page_size, heads, head_dim].
Shape head_slice(int64_t first, int64_t heads) {
    return {first * kHead, {{kPages, kPageSize * kRow}, {kPageSize, kRow}, {heads, kHead}}, kHead};
}

// The same bytes as heads-first pages see them: [pages, heads, page_size, head_dim], token and head strides of HND.
Shape head_slice_hnd(int64_t first, int64_t heads) {
    return {
        first * kPageSize * kHead, {{kPages, kPageSize * kRow}, {kPageSize, kHead}, {heads, kPageSize * kHead}}, kHead};
}

// Elements [first, first + elements) of every head: a slice along head_dim, as a rope part is.
Shape dim_slice(int64_t first, int64_t elements) {
    return {2 * first, {{kPages, kPageSize * kRow}, {kPageSize, kRow}, {kHeads, kHead}}, 2 * elements};
}

Shape moved(Shape shape, int64_t bytes) {
    shape.begin += bytes;
    return shape;
}

Shape with_layers(Shape shape, int64_t layers, int64_t stride) {
    shape.axes.push_back({layers, stride});
    return shape;
}

void test_real_pools() {
    const auto disjoint = [](const Shape& a, const Shape& b) {
        check(!may_share_bytes(a.set(), b.set()), a << " and " << b);
        check(!may_share_bytes(b.set(), a.set()), b << " and " << a);
    };
    const auto shared = [](const Shape& a, const Shape& b) {
        check(may_share_bytes(a.set(), b.set()), a << " and " << b);
        check(may_share_bytes(b.set(), a.set()), b << " and " << a);
    };
    for (auto* layer : {page_first, page_first_tokens, page_first_direct, page_head}) {
        for (int64_t other : {1, 2, 17, 31}) disjoint(layer(0), layer(other));
        disjoint(layer(30), layer(31));
        shared(layer(5), layer(5));
        shared(layer(5), moved(layer(5), 1));
        shared(layer(5), moved(layer(5), -1));
        shared(layer(5), moved(layer(6), -1));
        shared(layer(6), moved(layer(5), 1));
        check(!overlaps_itself(layer(3).set()), layer(3));
    }
    disjoint(page_first(3), page_first_tokens(4));
    shared(page_first(4), page_first_tokens(4));
    // Even layers of the pool as one stack, odd ones as another; the first half and the second.
    disjoint(with_layers(page_first(0), 16, 2 * kRow), with_layers(page_first(1), 16, 2 * kRow));
    disjoint(with_layers(page_first(0), 16, kRow), with_layers(page_first_tokens(16), 16, kRow));
    shared(with_layers(page_first(0), 17, kRow), with_layers(page_first(16), 16, kRow));
    check(!overlaps_itself(with_layers(page_first(0), 32, kRow).set()), "the whole pool");
    check(overlaps_itself(with_layers(page_first(0), 33, kRow).set()), "a layer too many");

    disjoint(interleaved(7, 0), interleaved(7, 1));
    disjoint(interleaved(7, 1), interleaved(8, 0));
    shared(interleaved(7, 0), interleaved(7, 0));

    disjoint(head_slice(0, 4), head_slice(4, 4));
    disjoint(head_slice_hnd(0, 4), head_slice_hnd(4, 4));
    shared(head_slice(0, 5), head_slice(4, 4));
    // Token-first heads and head-first heads of one page are different cuts of the same bytes.
    shared(head_slice(0, 4), head_slice_hnd(4, 4));
    shared(head_slice(0, 8), head_slice_hnd(0, 8));

    disjoint(dim_slice(0, 64), dim_slice(64, 64));
    shared(dim_slice(0, 65), dim_slice(64, 64));

    // Even and odd tokens; the first pages and the rest; windows that slide by less than their length.
    const Shape even{0, {{kPages * 8, 2 * kRow}}, kRow}, odd{kRow, {{kPages * 8, 2 * kRow}}, kRow};
    disjoint(even, odd);
    shared(even, moved(odd, 1));
    disjoint({0, {{kPages, kRow}}, kRow}, {kPages * kRow, {{kPages, kRow}}, kRow});
    check(overlaps_itself(Shape{0, {{kPages, kRow / 2}}, kRow}.set()), "sliding windows");
    check(overlaps_itself(Shape{0, {{2, 0}, {kPages, kRow}}, kRow}.set()), "expanded");
    check(!overlaps_itself(Shape{0, {{1, 0}, {kPages, kRow}}, kRow}.set()), "expanded, but once");
    // Strides that have nothing in common: some step of one ends a byte beside some step of the other.
    check(overlaps_itself(Shape{0, {{1000, 7001}, {8000, 1009}}, 2}.set()),
          "two bytes at strides without a common divisor");
    check(!overlaps_itself(Shape{0, {{1000, 7001}, {6, 1009}}, 2}.set()), "6 * 1009 < 7001");
}

void test_many_sets() {
    // K and V of 4,000 layers, allocated apart; then one too many.
    std::vector<ByteSet> src, dst;
    for (int64_t i = 0; i < 8000; ++i)
        (i % 2 ? src : dst).push_back(Shape{i * 1000 * kRow, {{1000, kRow}}, kRow}.set());
    check(!first_shared(src, dst) && !first_shared(src) && !first_shared(dst), "apart");
    src.push_back(Shape{1234 * 1000 * kRow + 17, {}, 1}.set());
    const auto pair = first_shared(src, dst);
    check(pair && pair->first == src.size() - 1 && pair->second == 617, "the added byte");

    // All layers of one pool against all layers of another, pools woven into each other.
    src.clear();
    dst.clear();
    for (int64_t layer = 0; layer < 128; ++layer) {
        (layer % 2 ? src : dst).push_back(Shape{layer * kRow, {{kPages, 128 * kRow}, {kHeads, kHead}}, kHead}.set());
    }
    check(!first_shared(src, dst) && !first_shared(src), "woven");
}

}  // namespace

int main() {
    test_pairs_against_marks();
    test_self_against_marks();
    test_first_shared_against_pairs();
    const auto start = std::chrono::steady_clock::now();
    test_real_pools();
    test_many_sets();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    check(seconds.count() < 5, seconds.count() << " s for real pools");
    std::cout << "test_overlap: ok, real pools in " << seconds.count() << " s\n";
}
