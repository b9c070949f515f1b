// The host's side of dspark/device.h: kernels run on plain C++ fibers, one for each CUDA thread of a block.
//
// Made to find mistakes, not to be fast:
// - blocks run one after the other, in a shuffled order;
// - between two barriers one warp runs as far as it can before the next one starts, the warps and the lanes of a warp
//   in a shuffled order (all from one seed), so that a missing barrier shows;
// - shared memory is a heap allocation of exactly the requested size, full of NaN;
// - asynchronous copies happen at the wait, not before;
// - a barrier that not every thread reaches, a shuffle that not every lane reaches or that lanes reach from different
//   lines, and a misaligned access end the program with a message (abort).
// Not thread-safe: one launch at a time in a process.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// The built-in names of CUDA; the scheduler sets them when it changes fibers.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

#define DSPARK_DEVICE inline
#define DSPARK_HOST_DEVICE inline
#define DSPARK_KERNEL inline
#define DSPARK_BOUNDS(...)
#define DSPARK_UNROLL
// Every collective knows its line: lanes that meet from different lines have diverged.
#define DSPARK_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace dspark {

using Stream = void*;

namespace shim {

// Seeds the order of blocks, warps and lanes in the launches to come.
void set_seed(uint64_t seed);
// Switches of fibers so far, to measure what one costs.
uint64_t switches();

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

void block_barrier(const char* file, int line);

// All 32 lanes meet. The last one to arrive calls combine(given), given[lane] being what each lane brought (on its own
// stack, which lives on while the lane waits); all lanes go on after it.
using Combine = void (*)(void* const* given);
void warp_collective(const char* operation, const char* file, int line, void* given, Combine combine);

Status run(dim3 grid, unsigned threads, size_t shared_bytes, void (*body)(const void*), const void* context);

void check_aligned(const void* pointer, const char* what, const char* file, int line);
void check_shared(const void* pointer, const char* what, const char* file, int line);  // 16 aligned bytes of it

unsigned char* shared_memory();
void copy_async(void* shared, const void* global, bool valid);
void copy_async_commit();
void copy_async_wait(size_t newest);

float half_to_float(uint16_t bits);
uint16_t half_from_float(float x);
float bfloat16_to_float(uint16_t bits);
uint16_t bfloat16_from_float(float x);

struct MatrixLoad {
    const void* row;
    uint32_t* r;
};
void load_matrices(void* const* given);
void load_matrices_transposed(void* const* given);

struct Mma {
    float* d;
    const uint32_t *a, *b;
};
void mma_half(void* const* given);
void mma_bfloat16(void* const* given);

}  // namespace shim

inline unsigned char* shared_memory() { return shim::shared_memory(); }
inline void sync_block(DSPARK_SITE) { shim::block_barrier(file, line); }
inline void sync_warp(DSPARK_SITE) {
    shim::warp_collective("sync_warp", file, line, nullptr, [](void* const*) {});
}

template <typename V>
V shuffle(V value, int lane, DSPARK_SITE) {
    struct Given {
        V value, found;
        int lane;
    } given{value, value, lane & 31};
    shim::warp_collective("shuffle", file, line, &given, [](void* const* all) {
        for (int i = 0; i < 32; ++i) {
            Given* to = static_cast<Given*>(all[i]);
            to->found = static_cast<const Given*>(all[to->lane])->value;
        }
    });
    return given.found;
}
template <typename V>
V shuffle_xor(V value, int mask, DSPARK_SITE) {
    return shuffle(value, static_cast<int>(threadIdx.x % 32) ^ mask, file, line);
}
template <typename V>
V shuffle_down(V value, int by, DSPARK_SITE) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    return shuffle(value, lane + by < 32 ? lane + by : lane, file, line);
}

// Fibers change places only at collectives, so plain reads and writes are atomic.
template <typename V>
V atomic_add(V* at, V value) {
    const V old = *at;
    *at = old + value;
    return old;
}
template <typename V>
V atomic_max(V* at, V value) {
    const V old = *at;
    *at = old < value ? value : old;
    return old;
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Half x) { return shim::half_to_float(x.bits); }
inline float to_float(BFloat16 x) { return shim::bfloat16_to_float(x.bits); }

template <typename T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
    return x;
}
template <>
inline Half from_float<Half>(float x) {
    return {shim::half_from_float(x)};
}
template <>
inline BFloat16 from_float<BFloat16>(float x) {
    return {shim::bfloat16_from_float(x)};
}

template <typename T>
uint32_t pack(float low, float high) {
    return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}

struct alignas(16) Packet {
    uint32_t x, y, z, w;
};

inline Packet load_packet(const void* from, DSPARK_SITE) {
    shim::check_aligned(from, "load_packet", file, line);
    Packet packet;
    std::memcpy(&packet, from, 16);
    return packet;
}
inline void store_packet(void* to, Packet packet, DSPARK_SITE) {
    shim::check_aligned(to, "store_packet", file, line);
    std::memcpy(to, &packet, 16);
}

inline void copy_async(void* shared, const void* global, bool valid, DSPARK_SITE) {
    shim::check_shared(shared, "copy_async to", file, line);
    shim::check_aligned(global, "copy_async from", file, line);
    shim::copy_async(shared, global, valid);
}
inline void copy_async_commit() { shim::copy_async_commit(); }
template <int newest>
void copy_async_wait() {
    shim::copy_async_wait(newest);
}

inline void load_matrices(uint32_t (&r)[4], const void* row, DSPARK_SITE) {
    shim::check_shared(row, "load_matrices", file, line);
    shim::MatrixLoad given{row, r};
    shim::warp_collective("load_matrices", file, line, &given, shim::load_matrices);
}
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row, DSPARK_SITE) {
    shim::check_shared(row, "load_matrices_transposed", file, line);
    shim::MatrixLoad given{row, r};
    shim::warp_collective("load_matrices_transposed", file, line, &given, shim::load_matrices_transposed);
}

template <typename T>
void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], DSPARK_SITE);
template <>
inline void mma_16816<Half>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* file, int line) {
    shim::Mma given{d, a, b};
    shim::warp_collective("mma_16816", file, line, &given, shim::mma_half);
}
template <>
inline void mma_16816<BFloat16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* file,
                                int line) {
    shim::Mma given{d, a, b};
    shim::warp_collective("mma_16816", file, line, &given, shim::mma_bfloat16);
}

template <typename Type>
struct Exactly {
    using type = Type;
};

template <typename... Params>
Status launch(void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared_bytes, Stream,
              typename Exactly<Params>::type... args) {
    auto body = [&] { kernel(args...); };
    return shim::run(
        grid, threads, shared_bytes, [](const void* context) { (*static_cast<const decltype(body)*>(context))(); },
        &body);
}

}  // namespace dspark
