// The kernels of Accept; accept.cuh says what each is for, and launches them.
#pragma once

#include "dspark/accept_params.h"
#include "dspark/best.h"

namespace dspark {

namespace acceptance {

constexpr int THREADS = 128;
// Four blocks on a multiprocessor have enough loads under way. Without that number ptxas aims at more, and spills.
constexpr int RESIDENT = 4;
constexpr int WARPS = THREADS / 32;
constexpr int EACH = 16;  // elements of a thread: independent loads under way
constexpr int CHUNK = THREADS * EACH;

// A softmax: share is 1 over the sum of its exponentials, 0 where there are none.
struct Softmax {
    float largest, per_temperature, share;
};

// exp((logit - largest) / temperature), also where both are the same infinity.
DSPARK_DEVICE float exponential(float logit, float largest, float per_temperature) {
    if (!(logit > -INFINITY)) return 0.0f;
    return logit == largest ? 1.0f : expf((logit - largest) * per_temperature);
}

DSPARK_DEVICE float probability(float logit, const Softmax& of) {
    return exponential(logit, of.largest, of.per_temperature) * of.share;
}

// Where a request ended, if its token is still to be drawn.
struct Ending {
    int32_t row;       // of the target logits; -1: nothing to draw
    int32_t position;  // n
    int32_t refused;   // whether draft n was; if not, the draw is from p
    Softmax p, q;      // q.share < 0: q is all at the draft
};

struct Work {
    uint64_t* best;   // [rows, chunks], packed as in best.h
    float* sum;       // [rows, chunks], of exponentials against the chunk's largest logit
    float* drafted;   // [rows, chunks], the drafted token's logit; -inf: not in this chunk
    float* masses;    // [R, 2, chunks], of the residual and of p
    Ending* endings;  // [R]
    int32_t chunks;   // of the longer vocabulary
};

// rows above: the G + 1 target rows of each request, then its G + 1 draft rows, the last unused.
DSPARK_HOST_DEVICE int64_t work_row(const Accept& p, int request, int position, bool draft) {
    return (static_cast<int64_t>(request) * 2 + draft) * (p.gamma + 1) + position;
}

// Drafts to judge; -1: the request has no rows. In bounds whatever row_start holds.
DSPARK_DEVICE int verified(const Accept& p, int request) {
    const int first = p.row_start[request], end = p.row_start[request + 1];
    if (first < 0 || end > p.rows || end <= first) return -1;
    return end - first - 1 < p.gamma ? end - first - 1 : p.gamma;
}

DSPARK_DEVICE float temperature_of(const Accept& p, int request) {
    return p.temperature == nullptr || !(p.temperature[request] > 0.0f) ? 0.0f : p.temperature[request];
}

DSPARK_DEVICE float draft_temperature_of(const Accept& p, int request) {
    const bool drawn = p.draft_logits != nullptr && p.draft_temperature != nullptr;
    return drawn && p.draft_temperature[request] > 0.0f ? p.draft_temperature[request] : 0.0f;
}

template <typename T>
DSPARK_DEVICE const T* target_row(const Accept& p, int64_t row) {
    return static_cast<const T*>(p.target_logits) + row * p.vocab;
}

DSPARK_DEVICE const float* draft_row(const Accept& p, int request, int position) {
    return p.draft_logits + (static_cast<int64_t>(request) * p.gamma + position) * p.draft_vocab;
}

DSPARK_DEVICE int64_t drafted_token(const Accept& p, int64_t index) {
    return index + (p.d2t == nullptr ? 0 : p.d2t[index]);
}

// Of the whole block; every thread gets the result. scratch: WARPS floats of shared memory, not used by a call before.
DSPARK_DEVICE float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    sync_block();
    float sum = 0.0f;
    DSPARK_UNROLL
    for (int warp = 0; warp < WARPS; warp++) sum += scratch[warp];
    return sum;
}

// This thread's elements of a chunk, THREADS apart; -inf behind the row's end.
template <typename T>
DSPARK_DEVICE void load_chunk(float (&x)[EACH], const T* row, int first, int size) {
    DSPARK_UNROLL
    for (int i = 0; i < EACH; i++) {
        const int at = first + i * THREADS + static_cast<int>(threadIdx.x);
        x[i] = at < size ? to_float(row[at]) : -INFINITY;
    }
}

// blockIdx: x request and position, y chunk, z 0 target, 1 draft.
template <typename T>
DSPARK_KERNEL void DSPARK_BOUNDS(THREADS, RESIDENT) rows(Accept p, Work work) {
    const int request = blockIdx.x / (p.gamma + 1), position = blockIdx.x % (p.gamma + 1);
    const bool draft = blockIdx.z == 1;
    const int l = verified(p, request), size = draft ? p.draft_vocab : p.vocab;
    const int first = blockIdx.y * CHUNK;
    float temperature = temperature_of(p, request);
    if (draft && temperature > 0.0f) temperature = draft_temperature_of(p, request);
    if (first >= size || position > (draft ? l - 1 : l) || (draft && temperature == 0.0f)) return;

    float x[EACH];
    if (draft) {
        load_chunk(x, draft_row(p, request, position), first, size);
    } else {
        load_chunk(x, target_row<T>(p, p.row_start[request] + position), first, size);
    }
    uint64_t best = NO_BEST;
    DSPARK_UNROLL
    for (int i = 0; i < EACH; i++) best = better(best, pack_best(x[i], first + i * THREADS + threadIdx.x));
    best = warp_best(best);
    uint64_t* bests = reinterpret_cast<uint64_t*>(shared_memory());
    float* sums = reinterpret_cast<float*>(bests + WARPS);
    float* drafted = sums + WARPS;
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    if (threadIdx.x == 0) *drafted = -INFINITY;
    sync_block();
    DSPARK_UNROLL
    for (int warp = 0; warp < WARPS; warp++) best = better(best, bests[warp]);

    const int64_t at = work_row(p, request, position, draft) * work.chunks + blockIdx.y;
    if (threadIdx.x == 0) work.best[at] = best;
    if (temperature == 0.0f) return;
    if (draft) {
        const int64_t token = p.drafts[static_cast<int64_t>(request) * p.gamma + position];
        DSPARK_UNROLL
        for (int i = 0; i < EACH; i++) {
            const int index = first + i * THREADS + static_cast<int>(threadIdx.x);
            if (index < size && drafted_token(p, index) == token) *drafted = x[i];
        }
    }
    const float per_temperature = 1.0f / temperature;
    float sum = 0.0f;
    DSPARK_UNROLL
    for (int i = 0; i < EACH; i++) sum += exponential(x[i], best_score(best), per_temperature);
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) {
        work.sum[at] = sum;
        work.drafted[at] = *drafted;
    }
}

// The chunks of a row put together, by a warp: softmax, best index, and the drafted token's logit of a draft row.
struct Row {
    Softmax softmax;
    uint64_t best;
    float drafted;
};

DSPARK_DEVICE Row gather_row(const Work& work, int64_t row, int size, float temperature, bool draft) {
    const int chunks = (size - 1) / CHUNK + 1, lane = threadIdx.x % 32;
    const int64_t first = row * work.chunks;
    uint64_t best = NO_BEST;
    for (int chunk = lane; chunk < chunks; chunk += 32) best = better(best, work.best[first + chunk]);
    best = warp_best(best);
    float sum = 0.0f, drafted = -INFINITY;
    const float per_temperature = 1.0f / temperature;
    if (temperature > 0.0f) {
        for (int chunk = lane; chunk < chunks; chunk += 32) {
            const float largest = best_score(work.best[first + chunk]);
            sum += work.sum[first + chunk] * exponential(largest, best_score(best), per_temperature);
            if (draft && work.drafted[first + chunk] > drafted) drafted = work.drafted[first + chunk];
        }
        sum = warp_sum(sum);
        DSPARK_UNROLL
        for (int mask = 16; mask > 0; mask /= 2) {
            const float other = shuffle_xor(drafted, mask);
            if (other > drafted) drafted = other;
        }
    }
    return {{best_score(best), per_temperature, sum > 0.0f ? 1.0f / sum : 0.0f}, best, drafted};
}

// What a position says, for the thread that walks through them.
struct Position {
    uint64_t best;
    Softmax p, q;
    int32_t keep;
};

// A block has a request, a warp some of its positions.
template <typename T>
DSPARK_KERNEL void DSPARK_BOUNDS(THREADS, RESIDENT) decide(Accept p, Work work) {
    const int request = blockIdx.x, l = verified(p, request);
    const float temperature = temperature_of(p, request), draft_temperature = draft_temperature_of(p, request);
    if (l < 0) {
        if (threadIdx.x == 0) {
            p.accepted[request] = 0;
            p.next[request] = -1;
            work.endings[request].row = -1;
        }
        return;
    }
    const int64_t* drafts = p.drafts + static_cast<int64_t>(request) * p.gamma;
    Position* positions = reinterpret_cast<Position*>(shared_memory());
    for (int k = threadIdx.x / 32; k <= l; k += WARPS) {
        const Row target = gather_row(work, work_row(p, request, k, false), p.vocab, temperature, false);
        Position here{target.best, target.softmax, {0.0f, 0.0f, -1.0f}, 0};
        if (k < l) {
            const int64_t token = drafts[k];
            if (temperature > 0.0f) {
                float q = 1.0f;
                if (draft_temperature > 0.0f) {
                    const int64_t row = work_row(p, request, k, true);
                    const Row draft = gather_row(work, row, p.draft_vocab, draft_temperature, true);
                    here.q = draft.softmax;
                    q = probability(draft.drafted, draft.softmax);
                }
                const float u = p.accept_uniform[static_cast<int64_t>(request) * p.gamma + k];
                const bool known = token >= 0 && token < p.vocab;
                const float logit = known ? to_float(target_row<T>(p, p.row_start[request] + k)[token]) : -INFINITY;
                here.keep = u * q < probability(logit, here.p);
            } else {
                here.keep = token == best_index(target.best);
            }
        }
        if (threadIdx.x % 32 == 0) positions[k] = here;
    }
    sync_block();
    if (threadIdx.x != 0) return;
    int n = 0;
    while (n < l && positions[n].keep) n++;
    const bool drawn = temperature > 0.0f;
    p.accepted[request] = n;
    if (!drawn) p.next[request] = best_index(positions[n].best);
    work.endings[request] = {drawn ? p.row_start[request] + n : -1, n, n < l, positions[n].p, positions[n].q};
}

// weights[i] of a chunk's tokens in shared memory: p, or the residual where a draft was refused. Returns this thread's
// share of the sum of p.
template <typename T>
DSPARK_DEVICE float stage_weights(const Accept& p, const Ending& ending, int request, int first, bool residual,
                                  float* weights) {
    float x[EACH];
    load_chunk(x, target_row<T>(p, ending.row), first, p.vocab);
    float sum = 0.0f;
    DSPARK_UNROLL
    for (int i = 0; i < EACH; i++) {
        const float weight = probability(x[i], ending.p);
        weights[i * THREADS + threadIdx.x] = weight;
        sum += weight;
    }
    sync_block();
    if (residual && ending.refused) {
        if (ending.q.share < 0.0f) {
            const int64_t at = p.drafts[static_cast<int64_t>(request) * p.gamma + ending.position] - first;
            if (threadIdx.x == 0 && at >= 0 && at < CHUNK) weights[at] = 0.0f;
        } else {
            // d2t has no order that is promised, so every chunk looks through all of it; each token occurs once in it.
            const float* q = draft_row(p, request, ending.position);
            const int begin = p.d2t == nullptr ? first : 0;
            const int end = p.d2t == nullptr && p.draft_vocab > first + CHUNK ? first + CHUNK : p.draft_vocab;
            for (int index = begin + static_cast<int>(threadIdx.x); index < end; index += THREADS) {
                const int64_t at = drafted_token(p, index) - first;
                if (at < 0 || at >= CHUNK) continue;
                const float left = weights[at] - probability(q[index], ending.q);
                weights[at] = left > 0.0f ? left : 0.0f;
            }
        }
        sync_block();
    }
    return sum;
}

// blockIdx: x request, y chunk.
template <typename T>
DSPARK_KERNEL void DSPARK_BOUNDS(THREADS, RESIDENT) masses(Accept p, Work work) {
    const int request = blockIdx.x;
    const Ending ending = work.endings[request];
    if (ending.row < 0) return;
    float* weights = reinterpret_cast<float*>(shared_memory());
    const float p_mass = stage_weights<T>(p, ending, request, blockIdx.y * CHUNK, true, weights);
    float residual = 0.0f;
    DSPARK_UNROLL
    for (int i = 0; i < EACH; i++) residual += weights[i * THREADS + threadIdx.x];
    const float residual_sum = block_sum(residual, weights + CHUNK);
    const float p_sum = block_sum(p_mass, weights + CHUNK + WARPS);
    if (threadIdx.x == 0) {
        float* to = work.masses + static_cast<int64_t>(request) * 2 * work.chunks + blockIdx.y;
        to[0] = residual_sum;
        to[work.chunks] = p_sum;
    }
}

struct Choice {
    int index;
    float below;  // sum of the weights before it
};

// The first weight whose running sum exceeds the threshold; the last positive one where rounding leaves none.
DSPARK_DEVICE Choice choose(const float* weights, int count, float threshold) {
    Choice choice{0, 0.0f};
    float sum = 0.0f;
    for (int i = 0; i < count; i++) {
        if (!(weights[i] > 0.0f)) continue;
        choice = {i, sum};
        sum += weights[i];
        if (sum > threshold) break;
    }
    return choice;
}

template <typename T>
DSPARK_KERNEL void DSPARK_BOUNDS(THREADS, RESIDENT) draw(Accept p, Work work) {
    const int request = blockIdx.x, chunks = (p.vocab - 1) / CHUNK + 1;
    const Ending ending = work.endings[request];
    if (ending.row < 0) return;
    float* weights = reinterpret_cast<float*>(shared_memory());
    float* shares = weights + CHUNK;      // of threads
    float* of_chunks = shares + THREADS;  // [2, chunks]
    const float* of_request = work.masses + static_cast<int64_t>(request) * 2 * work.chunks;
    for (int chunk = threadIdx.x; chunk < chunks; chunk += THREADS) {
        of_chunks[chunk] = of_request[chunk];
        of_chunks[chunks + chunk] = of_request[work.chunks + chunk];
    }
    sync_block();
    // Every thread walks the same short way, which saves a barrier for its result.
    float total = 0.0f;
    for (int chunk = 0; chunk < chunks; chunk++) total += of_chunks[chunk];
    const bool residual = total > 0.0f;
    if (!residual) {
        of_chunks += chunks;
        total = 0.0f;
        for (int chunk = 0; chunk < chunks; chunk++) total += of_chunks[chunk];
    }
    float threshold = p.final_uniform[request] * total;
    const Choice chunk = choose(of_chunks, chunks, threshold);
    threshold -= chunk.below;
    stage_weights<T>(p, ending, request, chunk.index * CHUNK, residual, weights);
    float share = 0.0f;
    for (int i = 0; i < EACH; i++) share += weights[threadIdx.x * EACH + i];
    shares[threadIdx.x] = share;
    sync_block();
    if (threadIdx.x != 0) return;
    const Choice thread = choose(shares, THREADS, threshold);
    const Choice token = choose(weights + thread.index * EACH, EACH, threshold - thread.below);
    p.next[request] = static_cast<int64_t>(chunk.index) * CHUNK + thread.index * EACH + token.index;
}

}  // namespace acceptance

}  // namespace dspark
