// The kernels of BlockAttention: append, attend, merge. block_attention.cuh says what they are made for.
#pragma once

#include "dspark/attention_params.h"
#include "dspark/attention_products.cuh"

namespace dspark::attention {

constexpr float LOG2_E = 1.4426950408889634f;  // scores are kept in powers of 2

// How the work of one thread block is cut. Warps share the keys of a tile in the score product and the head's elements
// in the value product, so that no element of a key or value is read from shared memory by two warps.
template <typename T, int DEPTH, int ROW_TILES>
struct Shape {
    static constexpr bool large = DEPTH * sizeof(T) > 1024;  // fp32 with heads of 512
    static constexpr int warps = large ? 2 : 4;
    static constexpr int threads = 32 * warps;
    static constexpr int columns = large ? 16 : DEPTH * sizeof(T) > 256 ? 32 : 64;  // keys of a tile
    static constexpr int rows = 16 * ROW_TILES;
    static constexpr int packet = 16 / sizeof(T);  // elements
    // One packet of padding moves each row on by four banks: the eight rows of a matrix load meet in no bank.
    static constexpr int stride = DEPTH + packet;
    static constexpr int weight_stride = columns + packet;
    static constexpr int score_tiles = columns / warps / 8;  // of 8 keys, for one warp
    static constexpr int value_tiles = DEPTH / warps / 8;    // of 8 elements, for one warp
    static constexpr size_t shared_bytes = (rows * stride + 2 * columns * stride + rows * weight_stride) * sizeof(T) +
                                           warps * rows * sizeof(float) + 2 * columns * sizeof(int32_t);
    static constexpr size_t partial_floats = rows * (DEPTH + 2);  // of one tile of rows and one split
    static_assert(shared_bytes <= MAX_SHARED_BYTES, "too much shared memory");
};

// The last i with start[i] * scale / by + i * step <= x. The sequence ascends and start[0] = 0.
DSPARK_HOST_DEVICE int last_at_most(const int32_t* start, int count, int x, int scale, int by, int step) {
    int low = 0, high = count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (start[middle] * scale / by + middle * step <= x) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// A tile of query rows: `count` consecutive pairs (block row, head of the group), from pair `first` of its request on.
struct RowTile {
    int request;
    int first_row;  // of the request, in q
    int first, count;
    int committed;   // cache rows before the block: Cr
    int begin, end;  // columns (cache rows) that any row of the tile sees
};

// Tiles of a request with n rows lie at row_start * group / rows + request and on, which leaves room for
// ceil(n * group / rows) of them: the place of every tile follows from row_start alone, without a scan.
DSPARK_DEVICE bool find_tile(const BlockAttention& p, int tile, int rows, RowTile& found) {
    const int group = p.heads / p.kv_heads;
    const int request = last_at_most(p.row_start, p.requests, tile, group, rows, 1);
    const int first_row = p.row_start[request], block = p.row_start[request + 1] - first_row;
    const int first = (tile - (first_row * group / rows + request)) * rows;
    if (first >= block * group) return false;
    const int count = block * group - first < rows ? block * group - first : rows;
    const int appended = p.context_start ? p.context_start[request + 1] - p.context_start[request] : 0;
    const int committed = p.length[request] + appended;
    const int capacity = p.request_pages * p.page_rows;  // rows behind it were dropped
    int end = committed + (p.causal ? (first + count - 1) / group + 1 : block);
    if (end > capacity) end = capacity;
    int begin = p.window ? committed - p.window + (p.causal ? first / group + 1 : 0) : 0;
    if (begin < 0) begin = 0;
    found = {request, first_row, first, count, committed, begin, end};
    return true;
}

// Tiles of columns that one split takes.
DSPARK_DEVICE int tiles_per_split(const RowTile& tile, int columns, int splits) {
    const int tiles = (tile.end - tile.begin + columns - 1) / columns;
    return (tiles + splits - 1) / splits;
}

template <typename T>
DSPARK_DEVICE void store_pair(T* to, float first, float second) {
    if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<uint32_t*>(to) = pack<T>(first, second);
    } else {
        to[0] = first, to[1] = second;
    }
}

// What the sum of weights * values is multiplied by to give the output; sum is in units of 2^maximum. 0 without any
// column, which only dropped rows can come to.
DSPARK_DEVICE float normalizer(float maximum, float sum, const float* sinks, int head) {
    if (sum == 0) return 0;
    if (sinks) sum += exp2f(sinks[head] * LOG2_E - maximum);
    return 1 / sum;
}

// One block per row of context_k / context_v, then of k / v: the row goes to its place in the caches. A row of padding
// is zeroed in `out`.
template <int ELEMENT_BYTES>
DSPARK_KERNEL void DSPARK_BOUNDS(128) append(BlockAttention p) {
    const int head_packets = p.head_size * ELEMENT_BYTES / 16;
    const bool is_context = static_cast<int>(blockIdx.x) < p.context_rows;
    const int row = static_cast<int>(blockIdx.x) - (is_context ? 0 : p.context_rows);
    const int32_t* start = is_context ? p.context_start : p.row_start;
    if (row >= start[p.requests]) {
        if (is_context) return;
        const int packets = p.heads * head_packets;
        unsigned char* out = static_cast<unsigned char*>(p.out) + static_cast<size_t>(row) * packets * 16;
        for (int i = threadIdx.x; i < packets; i += blockDim.x) store_packet(out + 16 * i, Packet{0, 0, 0, 0});
        return;
    }
    const int request = last_at_most(start, p.requests, row, 1, 1, 0);
    int column = p.length[request] + row - start[request];
    if (!is_context && p.context_start) column += p.context_start[request + 1] - p.context_start[request];
    if (column >= p.request_pages * p.page_rows) return;
    const size_t page = p.pages[request * p.request_pages + column / p.page_rows];
    const unsigned char* keys = static_cast<const unsigned char*>(is_context ? p.context_k : p.k);
    const unsigned char* values = static_cast<const unsigned char*>(is_context ? p.context_v : p.v);
    const int packets = p.kv_heads * head_packets;
    for (int i = threadIdx.x; i < packets; i += blockDim.x) {
        const size_t from = (static_cast<size_t>(row) * packets + i) * 16;
        const size_t cache_row = (page * p.kv_heads + i / head_packets) * p.page_rows + column % p.page_rows;
        const size_t to = (cache_row * head_packets + i % head_packets) * 16;
        store_packet(static_cast<unsigned char*>(p.key_cache) + to, load_packet(keys + from));
        store_packet(static_cast<unsigned char*>(p.value_cache) + to, load_packet(values + from));
    }
}

// Grid: tiles of rows, key/value heads, splits of the context. With one split the outputs are written, else the
// partial results: for each (tile, head, split) the sums [rows][DEPTH], then (maximum, sum of weights) [rows].
template <typename T, int DEPTH, int ROW_TILES>
DSPARK_KERNEL void DSPARK_BOUNDS((Shape<T, DEPTH, ROW_TILES>::threads))
    attend(BlockAttention p, float* partials, int splits) {
    using S = Shape<T, DEPTH, ROW_TILES>;
    RowTile tile;
    if (!find_tile(p, blockIdx.x, S::rows, tile)) return;
    const int split_tiles = tiles_per_split(tile, S::columns, splits);
    const int begin = tile.begin + static_cast<int>(blockIdx.z) * split_tiles * S::columns;
    const int left = (tile.end - begin + S::columns - 1) / S::columns;
    const int tiles = left < split_tiles ? left : split_tiles;
    if (tiles <= 0 && splits > 1) return;

    T* queries = reinterpret_cast<T*>(shared_memory());
    T* keys = queries + S::rows * S::stride;
    T* values = keys + S::columns * S::stride;
    T* weights = values + S::columns * S::stride;
    float* exchange = reinterpret_cast<float*>(weights + S::rows * S::weight_stride);  // [warps][rows]
    int32_t* slots = reinterpret_cast<int32_t*>(exchange + S::warps * S::rows);        // [2][columns]

    const int thread = threadIdx.x, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    const int kv_head = blockIdx.y, group = p.heads / p.kv_heads;
    const int active = (tile.count + 15) / 16;
    // Row r of the tile sees the columns ends - reach <= column < ends. Not causal, tile.begin and tile.end bound all.
    const int reach = p.causal && p.window ? p.window : 0x7fffffff;
    int ends[ROW_TILES][2];
    DSPARK_UNROLL
    for (int m = 0; m < ROW_TILES; ++m) {
        DSPARK_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * m + 8 * half + g;
            int end = p.causal ? tile.committed + (tile.first + row) / group + 1 : tile.end;
            if (end > tile.end) end = tile.end;
            ends[m][half] = row < tile.count ? end : 0;
        }
    }

    // The cache rows that hold the columns of a tile; -1 behind the last one. Two tables: a tile's values are still
    // being asked for when the next tile's keys are looked up.
    auto find_slots = [&](int index) {
        if (thread >= S::columns) return;
        const int column = begin + index * S::columns + thread;
        int slot = -1;
        if (column < tile.end) {
            const int page = p.pages[tile.request * p.request_pages + column / p.page_rows];
            slot = (page * p.kv_heads + kv_head) * p.page_rows + column % p.page_rows;
        }
        slots[index % 2 * S::columns + thread] = slot;
    };
    constexpr int packets = DEPTH / S::packet;
    auto load = [&](T* to, const void* cache, int index) {
        DSPARK_UNROLL
        for (int i = thread; i < S::columns * packets; i += S::threads) {
            const int slot = slots[index % 2 * S::columns + i / packets], element = i % packets * S::packet;
            const T* from = static_cast<const T*>(cache) + static_cast<size_t>(slot < 0 ? 0 : slot) * DEPTH + element;
            copy_async(to + i / packets * S::stride + element, from, slot >= 0);
        }
        copy_async_commit();
    };

    float sums[ROW_TILES][S::value_tiles][4] = {};
    float maximum[ROW_TILES][2], total[ROW_TILES][2] = {};  // of this thread's rows; total: its own columns only
    DSPARK_UNROLL
    for (int m = 0; m < ROW_TILES; ++m) maximum[m][0] = maximum[m][1] = -INFINITY;

    if (tiles > 0) {
        find_slots(0);
        sync_block();
        for (int i = thread; i < 16 * active * packets; i += S::threads) {
            const int row = i / packets, element = i % packets * S::packet;
            const int pair = tile.first + (row < tile.count ? row : 0);
            const size_t from =
                static_cast<size_t>(tile.first_row + pair / group) * p.heads + kv_head * group + pair % group;
            copy_async(queries + row * S::stride + element, static_cast<const T*>(p.q) + from * DEPTH + element,
                       row < tile.count);
        }
        load(keys, p.key_cache, 0);
    }
    for (int index = 0; index < tiles; ++index) {
        copy_async_wait<0>();
        sync_block();  // this tile's keys are there, and no warp needs the last tile's values
        load(values, p.value_cache, index);

        float scores[ROW_TILES][S::score_tiles][4] = {};
        const int warp_column = warp * 8 * S::score_tiles;
        multiply_transposed<DEPTH>(scores, active, queries, S::stride, keys + warp_column * S::stride, S::stride);
        DSPARK_UNROLL
        for (int m = 0; m < ROW_TILES; ++m) {
            if (m >= active) continue;
            DSPARK_UNROLL
            for (int half = 0; half < 2; ++half) {
                float highest = -INFINITY;
                DSPARK_UNROLL
                for (int n = 0; n < S::score_tiles; ++n) {
                    DSPARK_UNROLL
                    for (int i = 2 * half; i < 2 * half + 2; ++i) {
                        float score = scores[m][n][i] * p.scale;
                        if (p.softcap != 0) score = p.softcap * tanhf(score / p.softcap);
                        const int column = begin + index * S::columns + warp_column + 8 * n + 2 * t + i % 2;
                        const bool seen = column < ends[m][half] && column >= ends[m][half] - reach;
                        scores[m][n][i] = seen ? score * LOG2_E : -INFINITY;
                        highest = fmaxf(highest, scores[m][n][i]);
                    }
                }
                highest = fmaxf(highest, shuffle_xor(highest, 1));
                highest = fmaxf(highest, shuffle_xor(highest, 2));
                if (t == 0) exchange[warp * S::rows + 16 * m + 8 * half + g] = highest;
            }
        }
        if (index + 1 < tiles) find_slots(index + 1);
        sync_block();  // every warp is done with the keys; the maxima and the next slots are there
        if (index + 1 < tiles) {
            load(keys, p.key_cache, index + 1);
        } else {
            copy_async_commit();  // an empty group: the wait below counts groups
        }

        DSPARK_UNROLL
        for (int m = 0; m < ROW_TILES; ++m) {
            if (m >= active) continue;
            DSPARK_UNROLL
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * m + 8 * half + g;
                float highest = maximum[m][half];
                DSPARK_UNROLL
                for (int w = 0; w < S::warps; ++w) highest = fmaxf(highest, exchange[w * S::rows + row]);
                const float base = highest == -INFINITY ? 0 : highest;  // a row that has seen nothing yet
                const float factor = exp2f(maximum[m][half] - base);
                maximum[m][half] = highest;
                total[m][half] *= factor;
                DSPARK_UNROLL
                for (int n = 0; n < S::score_tiles; ++n) {
                    const float first = exp2f(scores[m][n][2 * half] - base);
                    const float second = exp2f(scores[m][n][2 * half + 1] - base);
                    total[m][half] += first + second;
                    store_pair(weights + row * S::weight_stride + warp_column + 8 * n + 2 * t, first, second);
                }
                DSPARK_UNROLL
                for (int n = 0; n < S::value_tiles; ++n) {
                    sums[m][n][2 * half] *= factor;
                    sums[m][n][2 * half + 1] *= factor;
                }
            }
        }
        copy_async_wait<1>();
        sync_block();  // the weights and this tile's values are there
        multiply<S::columns>(sums, active, weights, S::weight_stride, values + warp * 8 * S::value_tiles, S::stride);
    }

    // Each thread has the sum of its own columns' weights: add them up over the four lanes of a row, then the warps.
    DSPARK_UNROLL
    for (int m = 0; m < ROW_TILES; ++m) {
        if (m >= active) continue;
        DSPARK_UNROLL
        for (int half = 0; half < 2; ++half) {
            float sum = total[m][half];
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            if (t == 0) exchange[warp * S::rows + 16 * m + 8 * half + g] = sum;
        }
    }
    sync_block();
    const size_t slot = (static_cast<size_t>(blockIdx.x) * p.kv_heads + kv_head) * splits + blockIdx.z;
    float* partial = partials + slot * S::partial_floats;
    DSPARK_UNROLL
    for (int m = 0; m < ROW_TILES; ++m) {
        DSPARK_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * m + 8 * half + g;
            if (row >= tile.count) continue;
            float sum = 0;
            DSPARK_UNROLL
            for (int w = 0; w < S::warps; ++w) sum += exchange[w * S::rows + row];
            const int pair = tile.first + row, head = kv_head * group + pair % group;
            const int element = warp * 8 * S::value_tiles + 2 * t;
            if (splits == 1) {
                const float factor = normalizer(maximum[m][half], sum, p.sinks, head);
                const size_t to = static_cast<size_t>(tile.first_row + pair / group) * p.heads + head;
                T* out = static_cast<T*>(p.out) + to * DEPTH + element;
                DSPARK_UNROLL
                for (int n = 0; n < S::value_tiles; ++n) {
                    store_pair(out + 8 * n, sums[m][n][2 * half] * factor, sums[m][n][2 * half + 1] * factor);
                }
            } else {
                DSPARK_UNROLL
                for (int n = 0; n < S::value_tiles; ++n) {
                    store_pair(partial + row * DEPTH + element + 8 * n, sums[m][n][2 * half], sums[m][n][2 * half + 1]);
                }
                if (warp == 0 && t == 0) store_pair(partial + S::rows * DEPTH + 2 * row, maximum[m][half], sum);
            }
        }
    }
}

// Grid: tiles of rows, key/value heads, fours of rows; a warp merges the splits of one row.
template <typename T, int DEPTH, int ROW_TILES>
DSPARK_KERNEL void DSPARK_BOUNDS(128) merge(BlockAttention p, const float* partials, int splits) {
    using S = Shape<T, DEPTH, ROW_TILES>;
    RowTile tile;
    if (!find_tile(p, blockIdx.x, S::rows, tile)) return;
    const int row = blockIdx.z * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= tile.count) return;
    const int split_columns = tiles_per_split(tile, S::columns, splits) * S::columns;
    const size_t first = (static_cast<size_t>(blockIdx.x) * p.kv_heads + blockIdx.y) * splits;
    const float* row_sums = partials + first * S::partial_floats + row * DEPTH;
    const float* row_state = partials + first * S::partial_floats + S::rows * DEPTH + 2 * row;
    // Splits behind the last column wrote nothing.
    const int written = tile.end > tile.begin ? (tile.end - tile.begin + split_columns - 1) / split_columns : 0;
    float maximum = -INFINITY, sum = 0;
    for (int i = 0; i < written; ++i) maximum = fmaxf(maximum, row_state[i * S::partial_floats]);
    const float base = maximum == -INFINITY ? 0 : maximum;
    for (int i = 0; i < written; ++i) {
        sum += row_state[i * S::partial_floats + 1] * exp2f(row_state[i * S::partial_floats] - base);
    }
    const int group = p.heads / p.kv_heads, pair = tile.first + row;
    const int head = static_cast<int>(blockIdx.y) * group + pair % group;
    const float factor = normalizer(maximum, sum, p.sinks, head);
    const size_t to = static_cast<size_t>(tile.first_row + pair / group) * p.heads + head;
    T* out = static_cast<T*>(p.out) + to * DEPTH;
    for (int element = 4 * lane; element < DEPTH; element += 128) {
        float merged[4] = {};
        for (int i = 0; i < written; ++i) {
            float part[4];
            load_floats(part, row_sums + i * S::partial_floats + element);
            const float share = exp2f(row_state[i * S::partial_floats] - base) * factor;
            DSPARK_UNROLL
            for (int e = 0; e < 4; ++e) merged[e] = fmaf(part[e], share, merged[e]);
        }
        store_pair(out + element, merged[0], merged[1]);
        store_pair(out + element + 2, merged[2], merged[3]);
    }
}

}  // namespace dspark::attention
