// What a call of Accept is given.
#pragma once

#include "dspark/dtype.h"

namespace dspark {

// All pointers are to device memory.
struct Accept {
    const void* target_logits;       // dtype [T, V]
    const int32_t* row_start;        // [R + 1]: the target rows of request r are row_start[r] .. row_start[r + 1] - 1
    const int64_t* drafts;           // [R, G], of the target's vocabulary
    const float* temperature;        // [R]; null: 0
    const float* draft_logits;       // [R, G, Vd], what the drafts were drawn from; null: they were argmaxes
    const float* draft_temperature;  // [R], that they were drawn at, 0: argmaxes; null: 0
    const int64_t* d2t;              // [Vd], offsets: draft index i is token i + d2t[i]; null: the vocabularies are one
    const float* accept_uniform;     // [R, G] in [0, 1); null only without temperature
    const float* final_uniform;      // [R] in [0, 1), of draws of their own; likewise
    int32_t* accepted;               // [R]: n
    int64_t* next;                   // [R]: correction, residual draw or bonus
    DType dtype;
    int32_t rows, requests, gamma, vocab, draft_vocab;  // T, R, G, V, Vd
};

}  // namespace dspark
