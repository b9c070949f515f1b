// What the plugins need of the device besides the kernels.
#pragma once

#include <cstring>

#include "dspark/device.h"

namespace dspark {

#if defined(__CUDACC__)

// Of the current device; 132 if it does not say.
inline int multiprocessors() {
    int device = 0, count = 0;
    const bool known = cudaGetDevice(&device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
    return known && count > 0 ? count : 132;
}

inline Status copy_unless_same(void* to, const void* from, size_t bytes, Stream stream) {
    if (to == from) return Status::ok;
    const bool copied = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream) == cudaSuccess;
    return copied ? Status::ok : Status::launch_failed;
}

#else

inline int multiprocessors() { return 132; }

inline Status copy_unless_same(void* to, const void* from, size_t bytes, Stream) {
    if (to != from) std::memcpy(to, from, bytes);
    return Status::ok;
}

#endif

}  // namespace dspark
