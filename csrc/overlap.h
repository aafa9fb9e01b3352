// Whether strided sets of bytes share one. Decided from the strides, not from the bounding ranges: two layers of one
// page-first pool are woven into each other and share nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace kvops {

// The bytes base + i * stride + j * stride' + ... + [0, bytes), for all steps of up to five axes. Strides are not negative.
class ByteSet {
   public:
    ByteSet(const char* base, int64_t bytes) : base_(base), bytes_(bytes), empty_(bytes == 0) {}

    void add(int64_t size, int64_t stride);

    bool empty() const { return empty_; }
    const char* first() const { return base_; }
    const char* last() const;

   private:
    friend bool overlaps_itself(const ByteSet& set);
    friend bool may_share_bytes(const ByteSet& a, const ByteSet& b);

    struct Axis {
        int64_t size, stride;
    };
    static constexpr int kMaxAxes = 5;

    const char* base_;
    int64_t bytes_;
    bool empty_;
    int axes_ = 0;
    Axis axis_[kMaxAxes];
};

// Exact, unless the search takes more steps than is sane for a check before a copy: then true.
bool may_share_bytes(const ByteSet& a, const ByteSet& b);

// Whether two different steps of the axes lead to the same byte.
bool overlaps_itself(const ByteSet& set);

// The first pair that may share a byte, as positions in the vectors.
using SharedPair = std::optional<std::pair<size_t, size_t>>;
SharedPair first_shared(const std::vector<ByteSet>& a, const std::vector<ByteSet>& b);
SharedPair first_shared(const std::vector<ByteSet>& sets);

}  // namespace kvops
