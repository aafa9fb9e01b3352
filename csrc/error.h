// The one way in which kvops reports bad input: "kvops.<operator>: <what was found, what was expected>".
#pragma once

#include <stdexcept>
#include <string>

namespace kvops {

// std::runtime_error becomes Python's RuntimeError. (torch's own check macros put the build's file and line in front.)
[[noreturn]] inline void fail(const char* op, const std::string& text) {
    throw std::runtime_error("kvops." + std::string(op) + ": " + text);
}

}  // namespace kvops
