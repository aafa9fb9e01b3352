// What the tests here share: a check that prints what it saw, and random numbers that are the same in every run.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <sstream>
#include <string>

// Ends the test. `seen` is streamed, so that a failure names its case: check(a == b, "case " << i).
#define check(condition, seen)                                                                            \
    do {                                                                                                  \
        if (!(condition)) {                                                                               \
            std::ostringstream text;                                                                      \
            text << seen;                                                                                 \
            std::cerr << __FILE__ << ":" << __LINE__ << ": " #condition " fails: " << text.str() << "\n"; \
            std::exit(1);                                                                                 \
        }                                                                                                 \
    } while (false)

class Random {
   public:
    explicit Random(uint64_t seed) : engine_(seed) {}

    // From least to most, both included.
    int64_t between(int64_t least, int64_t most) {
        return least + static_cast<int64_t>(engine_() % static_cast<uint64_t>(most - least + 1));
    }

    bool one_in(int64_t n) { return between(1, n) == 1; }

   private:
    std::mt19937_64 engine_;
};
