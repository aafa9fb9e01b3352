// memcpy for large transfers: destination lines go to memory without being read first, and without driving everything else
// out of the cache. Worth a quarter of the memory bandwidth where the destination is larger than the cache.
#pragma once

#include <cstddef>

namespace kvops {

enum class Stores { cached, streaming };

// How a transfer of so many bytes in all should store.
Stores stores_for(size_t total_bytes);

void copy_bytes(char* dst, const char* src, size_t bytes, Stores stores);

// Asks for the lines of a row that is copied a few rows later.
void prefetch_row(const char* src, size_t bytes);

// Orders streamed bytes before whatever the thread stores next. Each thread calls it once, at its end.
void finish_stores(Stores stores);

}  // namespace kvops
