#include "dspark/markov_argmax.cuh"
#include "host_api.h"

using dspark::MarkovArgmax;
using dspark::Stream;

// The caller's picture of the struct has to have this size.
DSPARK_HOST_API size_t dspark_host_markov_argmax_size() { return sizeof(MarkovArgmax); }

DSPARK_HOST_API size_t dspark_host_markov_argmax_workspace(const MarkovArgmax* params) {
    return dspark::markov_argmax_workspace(*params);
}

DSPARK_HOST_API int32_t dspark_host_markov_argmax(const MarkovArgmax* params, void* workspace, size_t bytes,
                                                  Stream stream) {
    return static_cast<int32_t>(dspark::markov_argmax(*params, workspace, bytes, stream));
}
