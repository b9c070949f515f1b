// The only file that knows what the kernels run on: a GPU under nvcc, else the host shim (plugins/tests/shim), where
// every CUDA thread of a block is a fiber. Kernels are written with the names declared here and the CUDA built-ins
// threadIdx, blockIdx, blockDim, gridDim, and nothing else of CUDA.
//
// Blocks are one-dimensional, a multiple of 32 threads. Every shuffle, matrix operation and barrier is for full warps
// (full blocks): all lanes (threads) call it, from the same line. A thread may leave a kernel early only with its whole
// block. Shared memory is the one dynamic allocation of the launch, aligned to 128 bytes, at most MAX_SHARED_BYTES.
//
//   DSPARK_DEVICE, DSPARK_HOST_DEVICE   inline functions; templates too
//   DSPARK_KERNEL                       `template <...> DSPARK_KERNEL void DSPARK_BOUNDS(128) kernel(Params params)`;
//                                       a template, since two sources may include the header
//   DSPARK_BOUNDS(threads[, blocks])    the block size that a kernel is compiled for, and how many a multiprocessor has
//   DSPARK_UNROLL                       before a loop whose bounds are constants
//   shared_memory()                     unsigned char*
//   sync_block(), sync_warp()
//   shuffle(value, lane), shuffle_xor(value, mask), shuffle_down(value, by)     float, 32- and 64-bit integers
//   atomic_add(at, value)               float, int32, uint32, uint64; returns what was there
//   atomic_max(at, value)               int32, uint32, uint64
//   bits_of(float), float_of(uint32_t)
//   Packet, load_packet(from), store_packet(to, packet)      16 aligned bytes at once
//   copy_async(shared, global, valid)   16 bytes to shared memory behind the thread's back; zeros if not valid
//   copy_async_commit()                 closes a group of copies
//   copy_async_wait<n>()                returns when all but the newest n groups of this thread have arrived; other
//                                       threads see them after the next barrier
//   Half, BFloat16, to_float(x), from_float<T>(x), pack<T>(low, high)           rounded to nearest even
//   load_matrices(r, row), load_matrices_transposed(r, row), mma_16816<T>(d, a, b)           see below
//   launch(kernel, grid, threads, shared_bytes, stream, args...) -> Status
//
// The matrix product of a warp, PTX `mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32`: D[16][8] += A[16][16] B[16][8]
// with T fp16 or bf16 and fp32 sums. Lane l holds, with g = l / 4 and t = l % 4 (PTX: groupID, threadID_in_group):
//
//   a[0] = A[g    ][2t, 2t + 1]       a[2] = A[g    ][2t + 8, 2t + 9]
//   a[1] = A[g + 8][2t, 2t + 1]       a[3] = A[g + 8][2t + 8, 2t + 9]
//   b[0] = B[2t, 2t + 1][g]           b[1] = B[2t + 8, 2t + 9][g]
//   d[0], d[1] = D[g][2t, 2t + 1]     d[2], d[3] = D[g + 8][2t, 2t + 1]
//
// where two elements share a register, the one of the lower index in the lower half. (PTX ISA, "Matrix Fragments for
// mma.m16n8k16 with floating point type": element a_i is in row g for i in {0, 1, 4, 5}, else g + 8, and in column
// 2t + (i & 1), + 8 for i >= 4; b_i in row 2t + (i & 1), + 8 for i >= 2, and column g; c_i in row g for i < 2, else
// g + 8, and in column 2t + (i & 1). Register n holds the elements 2n and 2n + 1.)
//
// load_matrices is PTX `ldmatrix.sync.aligned.m8n8.x4.shared.b16`: four 8 x 8 matrices M0 .. M3 of 16-bit elements from
// shared memory. Lane l gives the address of row l % 8 of matrix l / 8 (16 aligned bytes). Then
//
//   load_matrices:              r[i] = Mi[g][2t, 2t + 1]
//   load_matrices_transposed:   r[i] = Mi[2t, 2t + 1][g]
//
// So an A fragment is load_matrices of A's quarters (rows 0-7, 8-15 of columns 0-7, then of columns 8-15); a B fragment
// is load_matrices of B's transpose (rows n, as keys lie in memory), or load_matrices_transposed of B itself.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "dspark/status.h"

namespace dspark {

// What every architecture from sm_80 on offers to one block (sm_86, sm_89 and sm_120 offer no more).
constexpr size_t MAX_SHARED_BYTES = 99 * 1024;

}  // namespace dspark

#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define DSPARK_DEVICE __device__ __forceinline__
#define DSPARK_HOST_DEVICE __host__ __device__ __forceinline__
#define DSPARK_KERNEL __global__
#define DSPARK_BOUNDS(...) __launch_bounds__(__VA_ARGS__)
#define DSPARK_UNROLL _Pragma("unroll")

namespace dspark {

using Stream = cudaStream_t;
using Half = __half;
using BFloat16 = __nv_bfloat16;

DSPARK_DEVICE unsigned char* shared_memory() {
    extern __shared__ __align__(128) unsigned char dspark_shared_memory[];
    return dspark_shared_memory;
}

DSPARK_DEVICE void sync_block() { __syncthreads(); }
DSPARK_DEVICE void sync_warp() { __syncwarp(); }

template <typename V>
DSPARK_DEVICE V shuffle(V value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}
template <typename V>
DSPARK_DEVICE V shuffle_xor(V value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <typename V>
DSPARK_DEVICE V shuffle_down(V value, int by) {
    return __shfl_down_sync(0xffffffffu, value, by);
}

DSPARK_DEVICE float atomic_add(float* at, float value) { return atomicAdd(at, value); }
DSPARK_DEVICE int32_t atomic_add(int32_t* at, int32_t value) { return atomicAdd(at, value); }
DSPARK_DEVICE uint32_t atomic_add(uint32_t* at, uint32_t value) { return atomicAdd(at, value); }
DSPARK_DEVICE uint64_t atomic_add(uint64_t* at, uint64_t value) {
    return atomicAdd(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
}
DSPARK_DEVICE int32_t atomic_max(int32_t* at, int32_t value) { return atomicMax(at, value); }
DSPARK_DEVICE uint32_t atomic_max(uint32_t* at, uint32_t value) { return atomicMax(at, value); }
DSPARK_DEVICE uint64_t atomic_max(uint64_t* at, uint64_t value) {
    return atomicMax(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
}

DSPARK_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
DSPARK_DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }

DSPARK_DEVICE float to_float(float x) { return x; }
DSPARK_DEVICE float to_float(Half x) { return __half2float(x); }
DSPARK_DEVICE float to_float(BFloat16 x) { return __bfloat162float(x); }

template <typename T>
DSPARK_DEVICE T from_float(float x);
template <>
DSPARK_DEVICE float from_float<float>(float x) {
    return x;
}
template <>
DSPARK_DEVICE Half from_float<Half>(float x) {
    return __float2half_rn(x);
}
template <>
DSPARK_DEVICE BFloat16 from_float<BFloat16>(float x) {
    return __float2bfloat16_rn(x);
}

template <typename T>
DSPARK_DEVICE uint32_t pack(float low, float high);
template <>
DSPARK_DEVICE uint32_t pack<Half>(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
}
template <>
DSPARK_DEVICE uint32_t pack<BFloat16>(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
}

using Packet = uint4;

DSPARK_DEVICE Packet load_packet(const void* from) { return *static_cast<const Packet*>(from); }
DSPARK_DEVICE void store_packet(void* to, Packet packet) { *static_cast<Packet*>(to) = packet; }

DSPARK_DEVICE uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

DSPARK_DEVICE void copy_async(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
DSPARK_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int newest>
DSPARK_DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(newest) : "memory");
}

DSPARK_DEVICE void load_matrices(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
DSPARK_DEVICE void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

template <typename T>
DSPARK_DEVICE void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
DSPARK_DEVICE void mma_16816<Half>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
DSPARK_DEVICE void mma_16816<BFloat16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <typename Type>
struct Exactly {
    using type = Type;
};

template <typename... Params>
Status launch(void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared_bytes, Stream stream,
              typename Exactly<Params>::type... args) {
    // Above 48 KiB a kernel has to be told, on the current device; this sets a number and waits for nothing.
    if (shared_bytes > 48 * 1024 && cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                         static_cast<int>(shared_bytes)) != cudaSuccess) {
        return Status::launch_failed;
    }
    kernel<<<grid, threads, shared_bytes, stream>>>(args...);
    return cudaGetLastError() == cudaSuccess ? Status::ok : Status::launch_failed;
}

}  // namespace dspark

#else

#include "shim.h"

#endif
