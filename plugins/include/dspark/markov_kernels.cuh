// The kernels of MarkovArgmax; markov_argmax.cuh says what each is for, and launches them.
#pragma once

#include "dspark/best.h"
#include "dspark/markov_params.h"
#include "dspark/tile_dot.cuh"

namespace dspark {

namespace markov {

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
// Two blocks on a multiprocessor have enough loads under way. Without that number ptxas aims at more and spills for it.
constexpr int RESIDENT = 2;
constexpr int ROWS = 16;          // of a matrix, for one warp
constexpr int HEAD_REQUESTS = 4;  // for which a head step reads a weight once
constexpr int MATRIX_TILES = 2;   // of 8 requests, for which a block reads a matrix once when they are many

// What passes from launch to launch.
struct Work {
    uint64_t* best;    // [R, G], packed as in best.h
    float* projected;  // [R, G, outputs]: head_weight's columns of h_k times h_k, + head_bias
    float* state;      // [2, R, r]: s before even and before odd steps
    void* e;           // [PARTS, R, r], or fp32 [R, r]
};

// Rows of head_weight per unit of e.
DSPARK_HOST_DEVICE int head_outputs(MarkovHead head) {
    return head == MarkovHead::rnn ? 3 : head == MarkovHead::gated ? 1 : 0;
}

DSPARK_DEVICE int64_t drafted_token(const MarkovArgmax& p, uint64_t best) {
    const uint32_t index = best_index(best);
    return index + (p.d2t == nullptr ? 0 : p.d2t[index]);
}

// W1[prev] of a request's step.
template <typename T>
DSPARK_DEVICE const T* previous_embedding(const MarkovArgmax& p, const Work& work, int request, int step) {
    const int64_t at = static_cast<int64_t>(request) * p.gamma + step;
    const int64_t token = step == 0 ? p.anchors[request] : drafted_token(p, work.best[at - 1]);
    // A token from nowhere would read outside of W1, and that ends the whole process on a GPU.
    const int64_t row = token < 0 ? 0 : token >= p.vocab ? p.vocab - 1 : token;
    return static_cast<const T*>(p.w1) + row * p.rank;
}

DSPARK_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename Dot>
DSPARK_KERNEL void DSPARK_BOUNDS(THREADS, RESIDENT) begin(MarkovArgmax p, Work work) {
    using T = typename Dot::Weight;
    const int rows = p.requests * p.gamma;
    if (blockIdx.y == 0) {
        for (int at = blockIdx.x * THREADS + threadIdx.x; at < rows; at += gridDim.x * THREADS) work.best[at] = NO_BEST;
    }
    const int outputs = head_outputs(p.head) * p.rank;
    if (outputs == 0) return;

    // A block has 16 rows of the weight, and its warps share the depth: there are too few rows to fill a GPU otherwise.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool rnn = p.head == MarkovHead::rnn;
    const int64_t stride = p.hidden_size + (rnn ? 2 : 1) * p.rank;
    const T* weight = static_cast<const T*>(p.head_weight) + (rnn ? 2 * p.rank : 0);
    const int first_row = blockIdx.x * 8 * Dot::TILES, first_output = blockIdx.y * ROWS;
    const auto hidden = [&](int n) -> const T* {
        const int64_t row = first_row + n;
        return row < rows ? static_cast<const T*>(p.hidden) + row * p.hidden_size : nullptr;
    };
    float d[Dot::TILES][4] = {};
    Dot::add(d, {weight + first_output * stride, stride, outputs - first_output}, hidden, 1, 0, p.hidden_size, warp,
             WARPS);

    constexpr int SUMS = Dot::TILES * 4 * 32;  // of a warp, [tile][i][lane]
    float* sums = reinterpret_cast<float*>(shared_memory());
    DSPARK_UNROLL
    for (int i = 0; i < Dot::TILES * 4; i++) sums[warp * SUMS + i * 32 + lane] = d[i / 4][i % 4];
    sync_block();
    for (int at = threadIdx.x; at < SUMS; at += THREADS) {
        const int tile = at / 128, i = at / 32 % 4, from = at % 32;
        const int output = first_output + from / 4 + 8 * (i / 2), row = first_row + 8 * tile + 2 * (from % 4) + i % 2;
        if (output >= outputs || row >= rows) continue;
        float sum = p.head_bias == nullptr ? 0.0f : to_float(static_cast<const T*>(p.head_bias)[output]);
        for (int w = 0; w < WARPS; w++) sum += sums[w * SUMS + at];
        work.projected[static_cast<int64_t>(row) * outputs + output] = sum;
    }
}

// sums[m][n] += this lane's share of (row m, the first `rows` of 3) . inputs[n], where null stands for zeros.
template <int vector, typename T, typename X>
DSPARK_DEVICE void add_products(float (&sums)[3][HEAD_REQUESTS], const T* row, int64_t row_stride, int rows,
                                const X* const (&inputs)[HEAD_REQUESTS], int depth) {
    for (int at = threadIdx.x % 32 * vector; at < depth; at += 32 * vector) {
        float x[HEAD_REQUESTS][vector] = {};
        DSPARK_UNROLL
        for (int n = 0; n < HEAD_REQUESTS; n++) {
            if (inputs[n] != nullptr) load_floats(x[n], inputs[n] + at);
        }
        DSPARK_UNROLL
        for (int m = 0; m < 3; m++) {
            if (m >= rows) continue;
            float weight[vector];
            load_floats(weight, row + m * row_stride + at);
            DSPARK_UNROLL
            for (int n = 0; n < HEAD_REQUESTS; n++) {
                DSPARK_UNROLL
                for (int i = 0; i < vector; i++) sums[m][n] += weight[i] * x[n][i];
            }
        }
    }
}

// e_k, gated and rnn. A warp has one unit of e for 4 requests. E is the type of e's parts.
template <typename T, typename E, int vector>
DSPARK_KERNEL void DSPARK_BOUNDS(THREADS, RESIDENT) head_step(MarkovArgmax p, Work work, int step) {
    const int unit = blockIdx.y * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = blockIdx.x * HEAD_REQUESTS, rank = p.rank;
    const bool rnn = p.head == MarkovHead::rnn;
    if (unit < rank) {
        const int64_t units = static_cast<int64_t>(p.requests) * rank;
        const float* before = work.state + step % 2 * units;
        float* after = work.state + (step + 1) % 2 * units;

        // Columns: gated [h ; w], rnn [s ; w ; h].
        const int64_t stride = p.hidden_size + (rnn ? 2 : 1) * rank;
        const T* row = static_cast<const T*>(p.head_weight) + unit * stride;
        const int rows = head_outputs(p.head);
        float sums[3][HEAD_REQUESTS] = {};
        if (rnn && step > 0) {
            const float* states[HEAD_REQUESTS];
            DSPARK_UNROLL
            for (int n = 0; n < HEAD_REQUESTS; n++) {
                states[n] = first + n < p.requests ? before + static_cast<int64_t>(first + n) * rank : nullptr;
            }
            add_products<vector>(sums, row, rank * stride, rows, states, rank);
        }
        const T* embeddings[HEAD_REQUESTS];
        DSPARK_UNROLL
        for (int n = 0; n < HEAD_REQUESTS; n++) {
            embeddings[n] = first + n < p.requests ? previous_embedding<T>(p, work, first + n, step) : nullptr;
        }
        add_products<vector>(sums, row + (rnn ? rank : p.hidden_size), rank * stride, rows, embeddings, rank);

        DSPARK_UNROLL
        for (int n = 0; n < HEAD_REQUESTS; n++) {
            float z[3];
            DSPARK_UNROLL
            for (int m = 0; m < 3; m++) z[m] = warp_sum(sums[m][n]);
            if (lane != n || first + n >= p.requests) continue;
            const int64_t request = first + n;
            const float* projected = work.projected + (request * p.gamma + step) * rows * rank + unit;
            float e;
            if (rnn) {
                const float gate = sigmoid(z[0] + projected[0]), candidate = tanhf(z[1] + projected[rank]);
                const float state = step == 0 ? 0.0f : before[request * rank + unit];
                after[request * rank + unit] = gate * state + (1.0f - gate) * candidate;
                e = tanhf(z[2] + projected[2 * rank]);
            } else {
                e = sigmoid(z[0] + projected[0]) * to_float(embeddings[n][unit]);
            }
            store_parts(static_cast<E*>(work.e) + request * rank + unit, units, e);
        }
    }
}

// logits_k and its best index. A warp has 16 rows of W2 for 8 * TILES requests; blockIdx.z counts steps, where they are
// independent of each other.
template <typename Dot>
DSPARK_KERNEL void DSPARK_BOUNDS(THREADS, RESIDENT) vocabulary(MarkovArgmax p, Work work, int first_step) {
    using T = typename Dot::Weight;
    using E = typename Dot::Input;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_request = blockIdx.x * 8 * Dot::TILES, step = first_step + blockIdx.z;
    const int64_t first_index = (static_cast<int64_t>(blockIdx.y) * WARPS + warp) * ROWS;
    uint64_t best[Dot::TILES][2] = {};
    if (first_index < p.draft_vocab) {
        float base[Dot::TILES][4];
        DSPARK_UNROLL
        for (int tile = 0; tile < Dot::TILES; tile++) {
            DSPARK_UNROLL
            for (int i = 0; i < 4; i++) {
                const int64_t index = first_index + lane / 4 + 8 * (i / 2);
                const int64_t request = first_request + 8 * tile + 2 * (lane % 4) + i % 2;
                const bool there = index < p.draft_vocab && request < p.requests;
                const int64_t at = (request * p.gamma + step) * p.draft_vocab + index;
                base[tile][i] = there ? to_float(static_cast<const T*>(p.base_logits)[at]) : 0.0f;
            }
        }
        float d[Dot::TILES][4] = {};
        if (p.head != MarkovHead::none) {
            const T* w2 = static_cast<const T*>(p.w2) + first_index * p.rank;
            const bool vanilla = p.head == MarkovHead::vanilla;
            const auto e = [&](int n) -> const E* {
                const int request = first_request + n;
                if (request >= p.requests) return nullptr;
                if constexpr (std::is_same<T, E>::value) {
                    if (vanilla) return previous_embedding<T>(p, work, request, step);
                }
                return static_cast<const E*>(work.e) + static_cast<int64_t>(request) * p.rank;
            };
            const int64_t part_stride = static_cast<int64_t>(p.requests) * p.rank;
            Dot::add(d, {w2, p.rank, p.draft_vocab - first_index}, e, vanilla ? 1 : PARTS<E>, part_stride, p.rank, 0,
                     1);
        }
        DSPARK_UNROLL
        for (int tile = 0; tile < Dot::TILES; tile++) {
            DSPARK_UNROLL
            for (int i = 0; i < 4; i++) {
                const int64_t index = first_index + lane / 4 + 8 * (i / 2);
                const int64_t request = first_request + 8 * tile + 2 * (lane % 4) + i % 2;
                if (index >= p.draft_vocab || request >= p.requests) continue;
                const int64_t at = (request * p.gamma + step) * p.draft_vocab + index;
                float score = base[tile][i] + d[tile][i];
                if (p.logits != nullptr) p.logits[at] = score;
                if (p.noise != nullptr && p.temperature != nullptr && p.temperature[request] > 0.0f) {
                    score = score / p.temperature[request] + p.noise[at];
                }
                best[tile][i % 2] = better(best[tile][i % 2], pack_best(score, static_cast<uint32_t>(index)));
            }
            DSPARK_UNROLL
            for (int n = 0; n < 2; n++) {  // over the lanes of the same requests
                DSPARK_UNROLL
                for (int mask = 4; mask < 32; mask *= 2) {
                    best[tile][n] = better(best[tile][n], shuffle_xor(best[tile][n], mask));
                }
            }
        }
    }
    uint64_t* of_warps = reinterpret_cast<uint64_t*>(shared_memory());
    constexpr int COLUMNS = 8 * Dot::TILES;
    if (lane < 4) {
        DSPARK_UNROLL
        for (int i = 0; i < 2 * Dot::TILES; i++) {
            of_warps[warp * COLUMNS + 8 * (i / 2) + 2 * lane + i % 2] = best[i / 2][i % 2];
        }
    }
    sync_block();
    const int request = first_request + static_cast<int>(threadIdx.x);
    if (threadIdx.x < COLUMNS && request < p.requests) {
        uint64_t of_block = NO_BEST;
        for (int w = 0; w < WARPS; w++) of_block = better(of_block, of_warps[w * COLUMNS + threadIdx.x]);
        atomic_max(work.best + static_cast<int64_t>(request) * p.gamma + step, of_block);
    }
}

// Tokens and confidences, a warp each. A confidence depends on tokens before its own only, and all are known now.
template <typename T, int vector>
DSPARK_KERNEL void DSPARK_BOUNDS(THREADS, RESIDENT) finish(MarkovArgmax p, Work work) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (row < static_cast<int64_t>(p.requests) * p.gamma) {
        const int lane = threadIdx.x % 32;
        float sum = 0.0f;
        const auto add = [&](const float* weight, const T* x, int depth) {
            for (int at = lane * vector; at < depth; at += 32 * vector) {
                float weights[vector], values[vector];
                load_floats(weights, weight + at);
                load_floats(values, x + at);
                DSPARK_UNROLL
                for (int i = 0; i < vector; i++) sum += weights[i] * values[i];
            }
        };
        if (p.confidence_weight != nullptr) {
            add(p.confidence_weight, static_cast<const T*>(p.hidden) + row * p.hidden_size, p.hidden_size);
            if (p.confidence_with_markov) {
                const int request = static_cast<int>(row / p.gamma), step = static_cast<int>(row % p.gamma);
                add(p.confidence_weight + p.hidden_size, previous_embedding<T>(p, work, request, step), p.rank);
            }
            sum = warp_sum(sum);
        }
        if (lane == 0) {
            const float bias = p.confidence_bias == nullptr ? 0.0f : *p.confidence_bias;
            p.confidence[row] = p.confidence_weight == nullptr ? 1.0f : sigmoid(sum + bias);
            p.tokens[row] = drafted_token(p, work.best[row]);
        }
    }
}

}  // namespace markov

}  // namespace dspark
