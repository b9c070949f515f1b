// BlockAttention: append new rows to a cache, attend over it. plugins/README.md says exactly what it means.
//
// Floor, per layer at Qwen3-4B's sizes (32 query heads, 8 key/value heads of 128, 16-bit), for R requests of B block
// rows over L cached rows each:
//
//   bytes        4096 R L (keys and values, once) + 24 576 R B (queries, outputs, new rows)
//   operations   16 384 R B L (two products, multiply and add)
//
// That is 4 B operations a byte: 24 for a verified block of 6, where GPUs balance at 150 to 300. Bytes decide until a
// call has some 50 rows a request; a prompt's chunk of hundreds of rows is decided by operations. R = 1, L = 4096 moves
// 16.8 MB a layer. So the design reads each key and value from memory once:
//
// - The rows of a tile are (block row, query head of one group) pairs: 6 rows x 4 heads share one read of their
//   key/value head, as rows of one matrix product.
// - The context is split over blocks until the device is full, since one request has only 8 (key/value) heads to give.
//   The partial results cost splits x 130 floats a query row, which stay in the level 2 cache.
// - Keys of the next tile fly while this tile's softmax and value product run, values while the key product runs.
//
// Launches: append (new context rows and the block's rows go to the cache, causal or not: what is not committed is
// scratch), attend (everything is read from the cache), and merge where the context was split.
//
// A column that no row of a tile sees is never read. One that only some rows see enters the others with the weight 0,
// so it must be finite: a NaN in a committed key or value can reach other rows of its own request, and no other
// request.
#pragma once

#include "dspark/attention_kernels.cuh"
#include "dspark/workspace.h"

namespace dspark {

namespace attention {

inline Status check(const BlockAttention& p) {
    auto aligned = [](const void* pointer) { return pointer && is_aligned(pointer); };
    const int64_t limit = int64_t{1} << 31;
    if (!is_dtype(p.dtype)) return Status::bad_dtype;
    if (p.rows < 0 || p.context_rows < 0 || p.requests < 1 || p.kv_heads < 1 || p.kv_heads > MAX_GRID) {
        return Status::bad_shape;
    }
    if (p.heads < 1 || p.heads % p.kv_heads != 0 || p.cache_pages < 1 || p.request_pages < 1 || p.page_rows < 1) {
        return Status::bad_shape;
    }
    if (p.head_size != 64 && p.head_size != 128 && p.head_size != 256 && p.head_size != 512) {
        return Status::unsupported_head_size;
    }
    // These products are counted in 32 bits on the device.
    if (int64_t{p.rows} * p.heads + p.requests >= limit || int64_t{p.rows} + p.context_rows >= limit) {
        return Status::bad_shape;
    }
    if (int64_t{p.cache_pages} * p.kv_heads >= limit / p.page_rows ||
        int64_t{p.request_pages} * p.page_rows >= limit / 2 || int64_t{p.request_pages} * p.requests >= limit ||
        p.window < 0 || p.target_blocks < 1) {
        return Status::bad_shape;
    }
    const bool context = p.context_k && p.context_v && p.context_start;
    if (!context && (p.context_k || p.context_v || p.context_start || p.context_rows)) return Status::bad_pointer;
    if (!p.row_start || !p.length || !p.pages || !aligned(p.key_cache) || !aligned(p.value_cache)) {
        return Status::bad_pointer;
    }
    if (p.context_rows && !(aligned(p.context_k) && aligned(p.context_v))) return Status::bad_pointer;
    if (p.rows && !(aligned(p.q) && aligned(p.k) && aligned(p.v) && aligned(p.out))) return Status::bad_pointer;
    return Status::ok;
}

// Upper bound of the row tiles of all requests.
template <typename S>
int64_t row_tiles(const BlockAttention& p) {
    return int64_t{p.rows} * (p.heads / p.kv_heads) / S::rows + p.requests;
}

template <typename S>
int count_splits(const BlockAttention& p) {
    const int64_t capacity = int64_t{p.request_pages} * p.page_rows;
    const int64_t useful = ceil_div(capacity, S::columns);
    const int64_t room = p.target_blocks / (row_tiles<S>(p) * p.kv_heads);
    const int64_t splits = useful < room ? useful : room;
    return static_cast<int>(splits < 1 ? 1 : splits > MAX_GRID ? MAX_GRID : splits);
}

template <typename T>
Status run_append(const BlockAttention& p, Stream stream) {
    const dim3 grid(static_cast<unsigned>(p.rows + p.context_rows));
    return launch(append<sizeof(T)>, grid, 128, 0, stream, p);
}

template <typename T, int DEPTH, int ROW_TILES>
Status run(const BlockAttention& p, void* workspace, size_t bytes, Stream stream) {
    using S = Shape<T, DEPTH, ROW_TILES>;
    const int64_t tiles = row_tiles<S>(p);
    const int splits = count_splits<S>(p);
    float* partials = static_cast<float*>(workspace);
    if (splits > 1) {
        if (bytes < tiles * p.kv_heads * splits * S::partial_floats * sizeof(float)) return Status::workspace_too_small;
        if (!workspace || !is_aligned(workspace)) return Status::bad_pointer;
    }
    Status status = run_append<T>(p, stream);
    if (status != Status::ok) return status;
    const unsigned x = static_cast<unsigned>(tiles), y = static_cast<unsigned>(p.kv_heads);
    const dim3 grid(x, y, static_cast<unsigned>(splits));
    status = launch(attend<T, DEPTH, ROW_TILES>, grid, S::threads, S::shared_bytes, stream, p, partials, splits);
    if (status != Status::ok || splits == 1) return status;
    return launch(merge<T, DEPTH, ROW_TILES>, dim3(x, y, S::rows / 4), 128, 0, stream, p, partials, splits);
}

// Rows of a tile: 32 pairs where a block has few rows (wider tiles would idle), 64 for prompts where registers and
// shared memory allow it.
template <typename T, int DEPTH>
Status run_sized(const BlockAttention& p, void* workspace, size_t bytes, Stream stream) {
    if constexpr (sizeof(T) == 2 && DEPTH <= 128) {
        if (int64_t{p.rows} * (p.heads / p.kv_heads) > int64_t{p.requests} * 32) {
            return run<T, DEPTH, 4>(p, workspace, bytes, stream);
        }
    }
    return run<T, DEPTH, (DEPTH * sizeof(T) >= 1024 ? 1 : 2)>(p, workspace, bytes, stream);
}

}  // namespace attention

// Bytes of workspace that are enough for any rows, requests and lengths at this head size and target_blocks.
inline size_t block_attention_workspace(const BlockAttention& p) {
    return static_cast<size_t>(p.target_blocks) * 64 * (p.head_size + 2) * sizeof(float);
}

// workspace: aligned to 16 bytes. Returns after the launches; errors of the kernels come with the stream.
inline Status block_attention(const BlockAttention& p, void* workspace, size_t bytes, Stream stream) {
    const Status status = attention::check(p);
    if (status != Status::ok) return status;
    if (p.rows + p.context_rows == 0) return Status::ok;
    return with_dtype(p.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (p.rows == 0) return attention::run_append<T>(p, stream);
        switch (p.head_size) {
            case 64:
                return attention::run_sized<T, 64>(p, workspace, bytes, stream);
            case 128:
                return attention::run_sized<T, 128>(p, workspace, bytes, stream);
            case 256:
                return attention::run_sized<T, 256>(p, workspace, bytes, stream);
            default:
                return attention::run_sized<T, 512>(p, workspace, bytes, stream);
        }
    });
}

}  // namespace dspark
