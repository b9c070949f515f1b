#include "host_api.h"

#include "dspark/device.h"

// Seeds the order in which the shim runs blocks, warps and lanes.
DSPARK_HOST_API void dspark_host_seed(uint64_t seed) { dspark::shim::set_seed(seed); }

DSPARK_HOST_API const char* dspark_host_status_text(int32_t status) {
    return dspark::status_text(static_cast<dspark::Status>(status));
}
