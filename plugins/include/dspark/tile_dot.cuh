// Products of 16 rows of a matrix with a few columns by one warp, straight from global memory: the matrix is read once
// and the columns are small enough to stay in the first-level cache. Two ways to the same numbers in the same place,
// the accumulator of mma.m16n8k16 (device.h): lane l holds, with g = l / 4 and t = l % 4,
//
//   d[tile][0, 1] = rows g,     columns 8 * tile + 2t, + 1
//   d[tile][2, 3] = rows g + 8, columns 8 * tile + 2t, + 1
//
// In both, the 4 lanes of a g read 16 bytes each of one row, which is two whole sectors of memory.
//
//     Dot::add(d, {first, stride, count}, column, parts, part_stride, depth, begin, step)
//
// adds to d the products of the rows with the columns over the chunks begin, begin + step, .. of depth elements.
// column(n) is where column n begins, null for zeros; each is a sum of `parts` parts, part_stride apart (PARTS).
#pragma once

#include <cstring>
#include <type_traits>

#include "dspark/dtype.h"

namespace dspark {

// An fp32 factor as a sum of parts in the weights' dtype, so that the matrix units multiply it as exactly as fp32 does:
// 3 x 8 bits of bf16 hold the 24 bits of an fp32, 2 x 11 bits of fp16 hold 22 of them. fp32 weights need no parts.
template <typename T>
constexpr int PARTS = std::is_same<T, float>::value  ? 1
                      : std::is_same<T, Half>::value ? 2
                                                     : 3;

template <typename T>
DSPARK_DEVICE void store_parts(T* at, int64_t part_stride, float value) {
    DSPARK_UNROLL
    for (int part = 0; part < PARTS<T>; part++) {
        at[part * part_stride] = from_float<T>(value);
        value -= to_float(at[part * part_stride]);
    }
}

// x[0 .. count - 1] = at[...]; several at once are 16-byte loads and need that alignment.
template <int count, typename T>
DSPARK_DEVICE void load_floats(float (&x)[count], const T* at) {
    if constexpr (count == 1) {
        x[0] = to_float(*at);
    } else {
        constexpr int each = 16 / sizeof(T);
        static_assert(count % each == 0, "whole packets");
        DSPARK_UNROLL
        for (int packet = 0; packet < count / each; packet++) {
            const Packet loaded = load_packet(at + packet * each);
            T elements[each];
            memcpy(elements, &loaded, sizeof(elements));
            DSPARK_UNROLL
            for (int i = 0; i < each; i++) x[packet * each + i] = to_float(elements[i]);
        }
    }
}

// Up to 16 rows of a matrix.
template <typename T>
struct Rows {
    const T* first;
    int64_t stride;
    int64_t count;  // more are not looked at
};

// On the matrix units. Rows, columns and their strides are 16-byte aligned, so depth is a multiple of 8.
template <typename T, int tiles>
struct MatrixDot {
    using Weight = T;
    using Input = T;
    static constexpr int TILES = tiles;
    static constexpr int VECTOR = 8;
    static constexpr int DEPTH = 32;  // of a chunk: 8 elements of each of 4 lanes

    template <typename Column>
    DSPARK_DEVICE static void add(float (&d)[tiles][4], const Rows<T>& rows, const Column& column, int parts,
                                  int64_t part_stride, int depth, int begin, int step) {
        const int lane = threadIdx.x % 32, quad = lane % 4, row = lane / 4;
        const T* from = rows.first + row * rows.stride;
        constexpr int AHEAD = 4;  // chunks whose loads are under way at once
        Packet loaded[AHEAD][2];
        const auto load_rows = [&](int chunk) {
            DSPARK_UNROLL
            for (int i = 0; i < AHEAD; i++) {
                const int at = (chunk + i * step) * DEPTH + 8 * quad;
                loaded[i][0] = load(from, at, row < rows.count && at < depth);
                loaded[i][1] = load(from, 8 * rows.stride + at, row + 8 < rows.count && at < depth);
            }
        };
        // Before the columns: to find one can take several loads that wait for each other.
        load_rows(begin);
        const T* columns[tiles];
        DSPARK_UNROLL
        for (int tile = 0; tile < tiles; tile++) columns[tile] = column(8 * tile + lane / 4);

        for (int chunk = begin; chunk * DEPTH < depth;) {
            DSPARK_UNROLL
            for (int i = 0; i < AHEAD; i++) {
                if ((chunk + i * step) * DEPTH >= depth) continue;
                // The order of a product's terms is free, so each lane takes 8 neighbours, 16 bytes, as its elements
                // 2t, 2t + 1, 2t + 8, 2t + 9 of two multiplications, of rows and columns alike.
                const int at = (chunk + i * step) * DEPTH + 8 * quad;
                const uint32_t low[4] = {loaded[i][0].x, loaded[i][1].x, loaded[i][0].y, loaded[i][1].y};
                const uint32_t high[4] = {loaded[i][0].z, loaded[i][1].z, loaded[i][0].w, loaded[i][1].w};
                for (int part = 0; part < parts; part++) {
                    DSPARK_UNROLL
                    for (int tile = 0; tile < tiles; tile++) {
                        const bool there = columns[tile] != nullptr && at < depth;
                        const Packet x = load(columns[tile], part * part_stride + at, there);
                        mma_16816<T>(d[tile], low, {x.x, x.y});
                        mma_16816<T>(d[tile], high, {x.z, x.w});
                    }
                }
            }
            chunk += AHEAD * step;
            load_rows(chunk);
        }
    }

  private:
    DSPARK_DEVICE static Packet load(const T* from, int64_t offset, bool there) {
        return there ? load_packet(from + offset) : Packet{0, 0, 0, 0};
    }
};

// In fp32 multiply-adds, for fp32 weights and for whatever is not aligned (vector 1). Columns may be of another type.
template <typename T, typename X, int vector>
struct PlainDot {
    using Weight = T;
    using Input = X;
    static constexpr int TILES = 1;
    static constexpr int VECTOR = vector;
    static constexpr int DEPTH = 4 * vector;

    template <typename Column>
    DSPARK_DEVICE static void add(float (&d)[1][4], const Rows<T>& rows, const Column& column, int, int64_t, int depth,
                                  int begin, int step) {
        const int quad = threadIdx.x % 4, row = threadIdx.x % 32 / 4;
        const T* from = rows.first + row * rows.stride;
        const X* columns[8];
        float sums[2][8];
        DSPARK_UNROLL
        for (int n = 0; n < 8; n++) {
            columns[n] = column(n);
            sums[0][n] = sums[1][n] = 0.0f;
        }
        for (int chunk = begin; chunk * DEPTH < depth; chunk += step) {
            const int at = chunk * DEPTH + quad * vector;
            if (at >= depth) continue;
            float weights[2][vector] = {};
            if (row < rows.count) load_floats(weights[0], from + at);
            if (row + 8 < rows.count) load_floats(weights[1], from + 8 * rows.stride + at);
            DSPARK_UNROLL
            for (int n = 0; n < 8; n++) {
                if (columns[n] == nullptr) continue;
                float x[vector];
                load_floats(x, columns[n] + at);
                DSPARK_UNROLL
                for (int i = 0; i < vector; i++) {
                    sums[0][n] += weights[0][i] * x[i];
                    sums[1][n] += weights[1][i] * x[i];
                }
            }
        }
        // Each lane gives away the columns of the other half, then of the other quarter, and keeps 2t and 2t + 1.
        DSPARK_UNROLL
        for (int h = 0; h < 2; h++) {
            float half[4];
            DSPARK_UNROLL
            for (int n = 0; n < 4; n++) {
                const float given = shuffle_xor(quad & 2 ? sums[h][n] : sums[h][n + 4], 2);
                half[n] = (quad & 2 ? sums[h][n + 4] : sums[h][n]) + given;
            }
            DSPARK_UNROLL
            for (int n = 0; n < 2; n++) {
                const float given = shuffle_xor(quad & 1 ? half[n] : half[n + 2], 1);
                d[0][2 * h + n] += (quad & 1 ? half[n + 2] : half[n]) + given;
            }
        }
    }
};

}  // namespace dspark
