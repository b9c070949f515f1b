// The two matrix products of a warp, over operands in shared memory. sums[m][n] is a 16 x 8 tile in the layout of
// mma_16816's d for every dtype; of the m only those below `active` are computed.
#pragma once

#include "dspark/device.h"

namespace dspark::attention {

// sums[m][n] += A[16 m ..][0 .. DEPTH] (B[8 n ..][0 .. DEPTH])^T
template <int DEPTH, int M, int N, typename T>
DSPARK_DEVICE void multiply_transposed(float (&sums)[M][N][4], int active, const T* a, int a_stride, const T* b,
                                       int b_stride) {
    const int lane = threadIdx.x % 32;
    // Matrix loads. A: rows 0-7, 8-15 of elements 0-7, then of 8-15. B: elements 0-7, 8-15, 16-23, 24-31 of 8 rows.
    const T* a_row = a + lane % 16 * a_stride + lane / 16 * 8;
    const T* b_row = b + lane % 8 * b_stride + lane / 8 * 8;
    DSPARK_UNROLL
    for (int d = 0; d < DEPTH; d += 32) {
        uint32_t fb[N][4];
        DSPARK_UNROLL
        for (int n = 0; n < N; ++n) load_matrices(fb[n], b_row + 8 * n * b_stride + d);
        DSPARK_UNROLL
        for (int m = 0; m < M; ++m) {
            if (m >= active) continue;
            DSPARK_UNROLL
            for (int half = 0; half < 2; ++half) {
                uint32_t fa[4];
                load_matrices(fa, a_row + 16 * m * a_stride + d + 16 * half);
                DSPARK_UNROLL
                for (int n = 0; n < N; ++n) mma_16816<T>(sums[m][n], fa, {fb[n][2 * half], fb[n][2 * half + 1]});
            }
        }
    }
}

// sums[m][n] += A[16 m ..][0 .. DEPTH] B[0 .. DEPTH][8 n ..]
template <int DEPTH, int M, int N, typename T>
DSPARK_DEVICE void multiply(float (&sums)[M][N][4], int active, const T* a, int a_stride, const T* b, int b_stride) {
    const int lane = threadIdx.x % 32;
    // Matrix loads. A as above. B: rows 0-7, 8-15 of elements 0-7, then of 8-15, transposed.
    const T* a_row = a + lane % 16 * a_stride + lane / 16 * 8;
    const T* b_row = b + lane % 16 * b_stride + lane / 16 * 8;
    DSPARK_UNROLL
    for (int d = 0; d < DEPTH; d += 16) {
        uint32_t fa[M][4];
        DSPARK_UNROLL
        for (int m = 0; m < M; ++m) {
            if (m < active) load_matrices(fa[m], a_row + 16 * m * a_stride + d);
        }
        DSPARK_UNROLL
        for (int n = 0; n < N; n += 2) {
            uint32_t fb[4];
            load_matrices_transposed(fb, b_row + d * b_stride + 8 * n);
            DSPARK_UNROLL
            for (int m = 0; m < M; ++m) {
                if (m >= active) continue;
                mma_16816<T>(sums[m][n], fa[m], {fb[0], fb[1]});
                mma_16816<T>(sums[m][n + 1], fa[m], {fb[2], fb[3]});
            }
        }
    }
}

DSPARK_DEVICE void load_floats(float (&to)[4], const float* from) {
    const Packet packet = load_packet(from);
    to[0] = float_of(packet.x), to[1] = float_of(packet.y), to[2] = float_of(packet.z), to[3] = float_of(packet.w);
}

// fp32 has no tensor cores that keep its precision: each lane computes the elements of d that it holds.
template <int DEPTH, int M, int N>
DSPARK_DEVICE void multiply_transposed(float (&sums)[M][N][4], int active, const float* a, int a_stride, const float* b,
                                       int b_stride) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int d = 0; d < DEPTH; d += 4) {
        float fb[N][2][4];
        DSPARK_UNROLL
        for (int n = 0; n < N; ++n) {
            load_floats(fb[n][0], b + (8 * n + 2 * t) * b_stride + d);
            load_floats(fb[n][1], b + (8 * n + 2 * t + 1) * b_stride + d);
        }
        DSPARK_UNROLL
        for (int m = 0; m < M; ++m) {
            if (m >= active) continue;
            DSPARK_UNROLL
            for (int half = 0; half < 2; ++half) {
                float fa[4];
                load_floats(fa, a + (16 * m + 8 * half + g) * a_stride + d);
                DSPARK_UNROLL
                for (int n = 0; n < N; ++n) {
                    DSPARK_UNROLL
                    for (int e = 0; e < 4; ++e) {
                        sums[m][n][2 * half] = fmaf(fa[e], fb[n][0][e], sums[m][n][2 * half]);
                        sums[m][n][2 * half + 1] = fmaf(fa[e], fb[n][1][e], sums[m][n][2 * half + 1]);
                    }
                }
            }
        }
    }
}

template <int DEPTH, int M, int N>
DSPARK_DEVICE void multiply(float (&sums)[M][N][4], int active, const float* a, int a_stride, const float* b,
                            int b_stride) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int d = 0; d < DEPTH; d += 4) {
        float fa[M][2][4];
        DSPARK_UNROLL
        for (int m = 0; m < M; ++m) {
            if (m >= active) continue;
            load_floats(fa[m][0], a + (16 * m + g) * a_stride + d);
            load_floats(fa[m][1], a + (16 * m + 8 + g) * a_stride + d);
        }
        DSPARK_UNROLL
        for (int e = 0; e < 4; ++e) {
            DSPARK_UNROLL
            for (int n = 0; n < N; ++n) {
                const float* fb = b + (d + e) * b_stride + 8 * n + 2 * t;
                const float first = fb[0], second = fb[1];
                DSPARK_UNROLL
                for (int m = 0; m < M; ++m) {
                    if (m >= active) continue;
                    sums[m][n][0] = fmaf(fa[m][0][e], first, sums[m][n][0]);
                    sums[m][n][1] = fmaf(fa[m][0][e], second, sums[m][n][1]);
                    sums[m][n][2] = fmaf(fa[m][1][e], first, sums[m][n][2]);
                    sums[m][n][3] = fmaf(fa[m][1][e], second, sums[m][n][3]);
                }
            }
        }
    }
}

}  // namespace dspark::attention
