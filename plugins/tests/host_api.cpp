#include "host_api.h"

#include "dspark/device.h"

// Seeds the order in which the shim runs blocks, warps and lanes; a GPU has an order of its own.
DSPARK_HOST_API void dspark_host_seed([[maybe_unused]] uint64_t seed) {
#if !defined(__CUDACC__)
    dspark::shim::set_seed(seed);
#endif
}

DSPARK_HOST_API const char* dspark_host_status_text(int32_t status) {
    return dspark::status_text(static_cast<dspark::Status>(status));
}
