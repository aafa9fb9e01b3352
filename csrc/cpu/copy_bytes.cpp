#include "copy_bytes.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvops {
namespace {

// Shorter rows leave too many half-filled lines behind, each of which costs a read of memory after all.
constexpr size_t kShortestStreamed = 256;
constexpr size_t kLine = 64;
constexpr size_t kPrefetched = 2048;  // of a row: beyond that the hardware's own prefetcher has caught on

#if defined(__x86_64__)

size_t last_level_cache() {
    static const size_t bytes = [] {
        const long found = sysconf(_SC_LEVEL3_CACHE_SIZE);
        return found > 0 ? static_cast<size_t>(found) : size_t(32) << 20;
    }();
    return bytes;
}

// `dst` lies on a line, `bytes` is a multiple of a line.
void stream_lines_sse2(char* dst, const char* src, size_t bytes) {
    for (size_t i = 0; i < bytes; i += kLine) {
        const auto* from = reinterpret_cast<const __m128i*>(src + i);
        auto* to = reinterpret_cast<__m128i*>(dst + i);
        const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
}

__attribute__((target("avx2"))) void stream_lines_avx2(char* dst, const char* src, size_t bytes) {
    for (size_t i = 0; i < bytes; i += kLine) {
        const auto* from = reinterpret_cast<const __m256i*>(src + i);
        auto* to = reinterpret_cast<__m256i*>(dst + i);
        const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to + 1, b);
    }
}

void stream_bytes(char* dst, const char* src, size_t bytes) {
    static const bool has_avx2 = __builtin_cpu_supports("avx2");
    const size_t head = -reinterpret_cast<uintptr_t>(dst) % kLine;
    std::memcpy(dst, src, head);
    const size_t lines = (bytes - head) / kLine * kLine;
    (has_avx2 ? stream_lines_avx2 : stream_lines_sse2)(dst + head, src + head, lines);
    std::memcpy(dst + head + lines, src + head + lines, bytes - head - lines);
}

#endif

}  // namespace

Stores stores_for(size_t total_bytes) {
#if defined(__x86_64__)
    return total_bytes >= last_level_cache() / 2 ? Stores::streaming : Stores::cached;
#else
    (void)total_bytes;
    return Stores::cached;
#endif
}

void copy_bytes(char* dst, const char* src, size_t bytes, Stores stores) {
#if defined(__x86_64__)
    if (stores == Stores::streaming && bytes >= kShortestStreamed) return stream_bytes(dst, src, bytes);
#endif
    (void)stores;
    std::memcpy(dst, src, bytes);
}

void prefetch_row(const char* src, size_t bytes) {
    const size_t end = std::min(bytes, kPrefetched);
    for (size_t i = 0; i < end; i += kLine) __builtin_prefetch(src + i, 0, 0);
}

void finish_stores(Stores stores) {
#if defined(__x86_64__)
    if (stores == Stores::streaming) _mm_sfence();
#endif
    (void)stores;
}

}  // namespace kvops
