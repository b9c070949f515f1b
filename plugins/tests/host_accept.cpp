#include "dspark/accept.cuh"
#include "host_api.h"

using dspark::Accept;
using dspark::Stream;

// The caller's picture of the struct has to have this size.
DSPARK_HOST_API size_t dspark_host_accept_size() { return sizeof(Accept); }

DSPARK_HOST_API size_t dspark_host_accept_workspace(const Accept* params) { return dspark::accept_workspace(*params); }

DSPARK_HOST_API int32_t dspark_host_accept(const Accept* params, void* workspace, size_t bytes, Stream stream) {
    return static_cast<int32_t>(dspark::accept(*params, workspace, bytes, stream));
}
