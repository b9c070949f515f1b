// What a call of MarkovArgmax is given.
#pragma once

#include "dspark/dtype.h"

namespace dspark {

enum class MarkovHead : int32_t { none = 0, vanilla = 1, gated = 2, rnn = 3 };

// The op's inputs and outputs in the order of plugins/README.md, all on the device. "weights": of `dtype`.
struct MarkovArgmax {
    const void* base_logits;         // weights [R, G, Vd]
    const int64_t* anchors;          // [R]
    const void* hidden;              // weights [R, G, H]
    const void* w1;                  // weights [V, r]; null only without a head
    const void* w2;                  // weights [Vd, r]; likewise
    const void* head_weight;         // weights, gated [r, H + r], rnn [3r, 2r + H]; null for other heads
    const void* head_bias;           // weights, gated [r], rnn [3r]; null: 0
    const float* confidence_weight;  // [H] or [H + r]; null: every confidence is 1
    const float* confidence_bias;    // [1]; null: 0
    const int64_t* d2t;              // [Vd], offsets; null: the vocabularies are one
    // A token is drawn, and not the argmax, where both are given and the temperature is above 0: the score is then
    // logits / temperature + noise, with Gumbel noise from the caller.
    const float* noise;        // [R, G, Vd]; null: none
    const float* temperature;  // [R]; null: 0
    int64_t* tokens;           // [R, G]
    float* confidence;         // [R, G]
    float* logits;             // [R, G, Vd], before temperature and noise; null: not wanted
    DType dtype;
    MarkovHead head;
    int32_t confidence_with_markov;
    int32_t requests, gamma, hidden_size, rank, vocab, draft_vocab;
};

}  // namespace dspark
