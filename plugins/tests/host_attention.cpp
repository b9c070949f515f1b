#include "dspark/block_attention.cuh"
#include "host_api.h"

using dspark::BlockAttention;
using dspark::Stream;

// The caller's picture of the struct has to have this size.
DSPARK_HOST_API size_t dspark_host_block_attention_size() { return sizeof(BlockAttention); }

DSPARK_HOST_API size_t dspark_host_block_attention_workspace(const BlockAttention* params) {
    return dspark::block_attention_workspace(*params);
}

DSPARK_HOST_API int32_t dspark_host_block_attention(const BlockAttention* params, void* workspace, size_t bytes,
                                                    Stream stream) {
    return static_cast<int32_t>(dspark::block_attention(*params, workspace, bytes, stream));
}
