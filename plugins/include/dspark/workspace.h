// How a kernel's host function divides the workspace that its caller gives it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dspark {

// Places of arrays one behind the other, each aligned to 16 bytes.
struct WorkspacePlan {
    size_t bytes = 0;  // of all so far

    size_t place(size_t wanted) {
        const size_t at = bytes;
        bytes += (wanted + 15) / 16 * 16;
        return at;
    }
};

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The largest grid in all of its dimensions but the first.
constexpr int64_t MAX_GRID = 65535;

}  // namespace dspark
