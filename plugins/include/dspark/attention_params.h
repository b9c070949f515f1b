// What a call of BlockAttention is given.
#pragma once

#include "dspark/dtype.h"

namespace dspark {

// The op's inputs, outputs and attributes. Sizes are named as in plugins/README.md. Pointers to tensors are aligned to
// 16 bytes. A plain C struct: callers from other languages fill it in by its order.
struct BlockAttention {
    const void* q;             // [T, Hq, D]
    const void* k;             // [T, Hkv, D]
    const void* v;             // [T, Hkv, D]
    void* key_cache;           // [P, Hkv, C, D], written in place: key_cache_out, holding what key_cache held
    void* value_cache;         // likewise
    const int32_t* row_start;  // [R + 1]
    const int32_t* length;     // [R]
    const int32_t* pages;      // [R, N]
    const void* context_k;     // [Tc, Hkv, D] or null, and then the next two are null too
    const void* context_v;
    const int32_t* context_start;  // [R + 1]
    const float* sinks;            // [Hq] or null: one more logit of each head's softmax, without a value
    void* out;                     // [T, Hq, D]
    DType dtype;                   // of q, k, v, the caches, context_k, context_v and out
    int32_t rows;                  // T
    int32_t context_rows;          // Tc
    int32_t requests;              // R
    int32_t heads;                 // Hq
    int32_t kv_heads;              // Hkv
    int32_t head_size;             // D: 64, 128, 256 or 512
    int32_t cache_pages;           // P
    int32_t request_pages;         // N
    int32_t page_rows;             // C
    int32_t causal;
    int32_t window;  // 0: none
    float scale;
    float softcap;          // 0: none
    int32_t target_blocks;  // how many thread blocks fill the device (2 a multiprocessor, say); 1: never split
};

}  // namespace dspark
