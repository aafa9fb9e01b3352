// Two intervals at x and y meet if and only if y - x lies in a window as wide as they are long. With x and y affine in
// their steps, y - x is a sum of bounded multiples of the strides; equal strides of both sets count once, with the
// difference of the steps. The search takes the largest stride first, tries only the multiples that the rest can still
// bring into the window, and gives up a branch whose rest, a multiple of the remaining strides' greatest common
// divisor, cannot hit it. A million pages of 16 tokens are 16 million tokens: a stride that divides another, with steps
// enough to fill the gaps between its multiples, makes one term with it. So paged and unpaged views of one pool compare
// as quickly as two of a kind.
#include "overlap.h"

#include <algorithm>
#include <numeric>

namespace kvops {
namespace {

constexpr int kMaxSteps = 100000;

int64_t floor_divide(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
int64_t ceil_divide(int64_t a, int64_t b) { return -floor_divide(-a, b); }

// Is there a sum of multiple * stride within [low, high]?
class WindowSearch {
   public:
    void add(int64_t stride, int64_t least, int64_t most) {
        for (int i = 0; i < terms_; ++i) {
            if (term_[i].stride == stride) {
                term_[i].least += least;
                term_[i].most += most;
                return;
            }
        }
        term_[terms_++] = {stride, least, most};
    }

    // `nonzero` asks for a sum other than the one of zeros alone.
    bool hits(int64_t low, int64_t high, bool nonzero) {
        std::sort(term_, term_ + terms_, [](const Term& a, const Term& b) { return a.stride > b.stride; });
        for (int i = terms_ - 1; i > 0; --i) {
            for (int j = i - 1; j >= 0; --j) {
                if (!joins(term_[j], term_[i], nonzero)) continue;
                std::copy(term_ + j + 1, term_ + terms_, term_ + j);
                --terms_;
                --i;
            }
        }
        rest_least_[terms_] = rest_most_[terms_] = divisor_[terms_] = 0;
        for (int i = terms_ - 1; i >= 0; --i) {
            rest_least_[i] = rest_least_[i + 1] + term_[i].least * term_[i].stride;
            rest_most_[i] = rest_most_[i + 1] + term_[i].most * term_[i].stride;
            divisor_[i] = std::gcd(divisor_[i + 1], term_[i].stride);
        }
        steps_ = 0;
        return search(0, low, high, nonzero);
    }

   private:
    struct Term {
        int64_t stride, least, most;
    };

    // Adds `wide` to `narrow` where both together reach each multiple of the narrow stride between their ends. With
    // `nonzero`, steps of zero in both must stay the only way to their sum of zero.
    static bool joins(const Term& wide, Term& narrow, bool nonzero) {
        const int64_t ratio = wide.stride / narrow.stride;
        if (wide.stride % narrow.stride != 0 || narrow.most - narrow.least < ratio - 1) return false;
        if (nonzero && (narrow.most >= ratio || -narrow.least >= ratio)) return false;
        narrow.least += ratio * wide.least;
        narrow.most += ratio * wide.most;
        return true;
    }

    bool search(int i, int64_t low, int64_t high, bool nonzero) {
        if (++steps_ > kMaxSteps) return true;
        if (low > rest_most_[i] || high < rest_least_[i]) return false;
        if (i == terms_) return !nonzero;  // low <= 0 <= high
        if (ceil_divide(low, divisor_[i]) * divisor_[i] > high) return false;
        const Term& term = term_[i];
        const int64_t from = std::max(term.least, ceil_divide(low - rest_most_[i + 1], term.stride));
        const int64_t to = std::min(term.most, floor_divide(high - rest_least_[i + 1], term.stride));
        for (int64_t multiple = from; multiple <= to; ++multiple) {
            const int64_t offset = multiple * term.stride;
            if (search(i + 1, low - offset, high - offset, nonzero && multiple == 0)) return true;
        }
        return false;
    }

    static constexpr int kMaxTerms = 10;
    int terms_ = 0;
    int steps_ = 0;
    Term term_[kMaxTerms];
    int64_t rest_least_[kMaxTerms + 1], rest_most_[kMaxTerms + 1], divisor_[kMaxTerms + 1];
};

struct Placed {
    const ByteSet* set;
    size_t number;
    bool of_b;
};

// Visits the pairs whose bounding ranges meet, in the order of addresses, until one may share a byte.
template <class Candidate>
SharedPair sweep(std::vector<Placed> placed, const Candidate& candidate) {
    placed.erase(std::remove_if(placed.begin(), placed.end(), [](const Placed& p) { return p.set->empty(); }),
                 placed.end());
    std::sort(placed.begin(), placed.end(),
              [](const Placed& a, const Placed& b) { return a.set->first() < b.set->first(); });
    std::vector<Placed> open;
    for (const Placed& next : placed) {
        open.erase(std::remove_if(open.begin(), open.end(),
                                  [&](const Placed& p) { return p.set->last() < next.set->first(); }),
                   open.end());
        for (const Placed& other : open) {
            if (candidate(other, next) && may_share_bytes(*other.set, *next.set)) {
                const bool in_order = other.of_b != next.of_b ? next.of_b : other.number < next.number;
                return in_order ? std::make_pair(other.number, next.number) : std::make_pair(next.number, other.number);
            }
        }
        open.push_back(next);
    }
    return std::nullopt;
}

}  // namespace

void ByteSet::add(int64_t size, int64_t stride) {
    if (size == 0) empty_ = true;
    if (size > 1) axis_[axes_++] = {size, stride};
}

const char* ByteSet::last() const {
    const char* last = base_ + bytes_ - 1;
    for (int i = 0; i < axes_; ++i) last += (axis_[i].size - 1) * axis_[i].stride;
    return last;
}

bool may_share_bytes(const ByteSet& a, const ByteSet& b) {
    if (a.empty() || b.empty() || a.last() < b.first() || b.last() < a.first()) return false;
    WindowSearch search;
    for (int i = 0; i < b.axes_; ++i) {
        if (b.axis_[i].stride > 0) search.add(b.axis_[i].stride, 0, b.axis_[i].size - 1);
    }
    for (int i = 0; i < a.axes_; ++i) {
        if (a.axis_[i].stride > 0) search.add(a.axis_[i].stride, -(a.axis_[i].size - 1), 0);
    }
    // y - x = apart + sum lies in (-b.bytes, a.bytes).
    const int64_t apart = b.base_ - a.base_;
    return search.hits(-b.bytes_ + 1 - apart, a.bytes_ - 1 - apart, false);
}

bool overlaps_itself(const ByteSet& set) {
    if (set.empty()) return false;
    WindowSearch search;
    for (int i = 0; i < set.axes_; ++i) {
        if (set.axis_[i].stride == 0) return true;
        for (int j = 0; j < i; ++j) {
            if (set.axis_[i].stride == set.axis_[j].stride) return true;
        }
        search.add(set.axis_[i].stride, -(set.axis_[i].size - 1), set.axis_[i].size - 1);
    }
    return search.hits(-set.bytes_ + 1, set.bytes_ - 1, true);
}

SharedPair first_shared(const std::vector<ByteSet>& a, const std::vector<ByteSet>& b) {
    std::vector<Placed> placed;
    for (size_t i = 0; i < a.size(); ++i) placed.push_back({&a[i], i, false});
    for (size_t i = 0; i < b.size(); ++i) placed.push_back({&b[i], i, true});
    return sweep(std::move(placed), [](const Placed& one, const Placed& other) { return one.of_b != other.of_b; });
}

SharedPair first_shared(const std::vector<ByteSet>& sets) {
    std::vector<Placed> placed;
    for (size_t i = 0; i < sets.size(); ++i) placed.push_back({&sets[i], i, false});
    return sweep(std::move(placed), [](const Placed&, const Placed&) { return true; });
}

}  // namespace kvops
