// Source and destination must share no byte, nor may destinations with each other: an error before any byte moves.
#pragma once

#include "geometry.h"

namespace kvops {

void check_overlap(const Request& request, const Geometry& geometry);

}  // namespace kvops
