// Checks of the shim itself, one per name given on the command line. Those named bad_* must abort.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "dspark/device.h"
#include "dspark/dtype.h"

namespace dspark {
namespace {

int failures = 0;

void expect(bool condition, const char* what) {
    if (condition) return;
    std::printf("failed: %s\n", what);
    ++failures;
}

DSPARK_KERNEL void reverse(const int* in, int* out) {
    int* shared = reinterpret_cast<int*>(shared_memory());
    shared[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
    sync_block();
    out[blockIdx.x * blockDim.x + threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

void barriers() {
    std::vector<int> in(5 * 96), out(5 * 96, -1);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<int>(i);
    expect(launch(reverse, dim3(5), 96, 96 * 4, nullptr, in.data(), out.data()) == Status::ok, "launch");
    for (int i = 0; i < 5 * 96; ++i) expect(out[i] == i / 96 * 96 + 95 - i % 96, "reversed in a block");
    expect(launch(reverse, dim3(0), 96, 96 * 4, nullptr, in.data(), out.data()) == Status::launch_failed, "no blocks");
}

// Without its barrier the other threads' elements are often missing: they read the NaN pattern (-1).
DSPARK_KERNEL void reverse_without_barrier(int* missing) {
    int* shared = reinterpret_cast<int*>(shared_memory());
    shared[threadIdx.x] = static_cast<int>(threadIdx.x);
    if (shared[blockDim.x - 1 - threadIdx.x] == -1) atomic_add(missing, 1);
}

void missing_barrier_shows() {
    for (uint64_t seed = 0; seed < 20; ++seed) {
        int missing = 0;
        shim::set_seed(seed);
        launch(reverse_without_barrier, dim3(1), 64, 64 * 4, nullptr, &missing);
        expect(missing > 0, "a missing barrier shows");
    }
}

DSPARK_KERNEL void shuffles(float* out, uint64_t* most, int32_t* total) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    float sum = static_cast<float>(thread);
    for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    const uint64_t down = shuffle_down(uint64_t{1} << 40 | static_cast<unsigned>(lane), 3);
    const int first = shuffle(thread, 0);
    out[thread] = sum + static_cast<float>(down & 0xffff) + static_cast<float>(first);
    atomic_max(most, down);
    atomic_add(total, 2);
}

void warp_shuffles() {
    std::vector<float> out(64);
    uint64_t most = 0;
    int32_t total = 0;
    launch(shuffles, dim3(1), 64, 0, nullptr, out.data(), &most, &total);
    for (int i = 0; i < 64; ++i) {
        const int sum = i < 32 ? 31 * 16 : 31 * 16 + 32 * 32, lane = i % 32;
        expect(out[i] == static_cast<float>(sum + (lane + 3 < 32 ? lane + 3 : lane) + i / 32 * 32), "shuffles");
    }
    expect(most == (uint64_t{1} << 40 | 31) && total == 128, "atomics");
}

// D = A B for small whole numbers, by fragments from memory: A and B by matrix loads, D by the formula.
template <typename T>
DSPARK_KERNEL void product(const T* a, const T* b, float* d, bool transpose) {
    T* shared = reinterpret_cast<T*>(shared_memory());  // A [16][16], then B [16][8] or its transpose [8][16]
    const int lane = static_cast<int>(threadIdx.x), matrix = lane / 8, row = lane % 8;
    copy_async(shared + lane * 8, a + lane * 8, true);
    copy_async(shared + 256 + lane % 16 * 8, b + lane % 16 * 8, true);
    copy_async_commit();
    copy_async_wait<0>();
    sync_block();
    uint32_t fa[4], fb[4];
    load_matrices(fa, shared + (matrix % 2 * 8 + row) * 16 + matrix / 2 * 8);
    if (transpose) {
        load_matrices(fb, shared + 256 + row * 16 + matrix % 2 * 8);
    } else {
        load_matrices_transposed(fb, shared + 256 + (matrix % 2 * 8 + row) * 8);
    }
    float sums[4] = {1, 1, 1, 1};
    mma_16816<T>(sums, fa, {fb[0], fb[1]});
    for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

template <typename T>
void matrix_products() {
    alignas(16) T a[16][16], b[16][8], bt[8][16];
    float d[16][8];
    for (int i = 0; i < 16; ++i) {
        for (int k = 0; k < 16; ++k) a[i][k] = from_float<T>(static_cast<float>(i * 3 - k * 5 + i * k % 7));
        for (int n = 0; n < 8; ++n) b[i][n] = bt[n][i] = from_float<T>(static_cast<float>(i - 4 * n + i * n % 5));
    }
    for (bool transpose : {false, true}) {
        const T* second = transpose ? &bt[0][0] : &b[0][0];
        launch(product<T>, dim3(1), 32, 384 * sizeof(T), nullptr, &a[0][0], second, &d[0][0], transpose);
        for (int i = 0; i < 16; ++i) {
            for (int n = 0; n < 8; ++n) {
                float sum = 1;
                for (int k = 0; k < 16; ++k) sum += to_float(a[i][k]) * to_float(b[k][n]);
                expect(d[i][n] == sum, "matrix product");
            }
        }
    }
}

void products() {
    matrix_products<Half>();
    matrix_products<BFloat16>();
}

// Every 16-bit number survives, and between neighbours the nearest is taken, the even one in the middle.
template <typename T>
void rounding(uint16_t infinity) {
    for (uint32_t bits = 0; bits < infinity; ++bits) {
        const T low{static_cast<uint16_t>(bits)}, high{static_cast<uint16_t>(bits + 1)};
        const float x = to_float(low);
        expect(from_float<T>(x).bits == bits && from_float<T>(-x).bits == (bits | 0x8000), "exact numbers stay");
        if (bits + 1 == infinity) break;
        const float middle = x + (to_float(high) - x) / 2;
        const uint32_t even = bits + bits % 2;
        expect(from_float<T>(middle).bits == even, "ties go to even");
        expect(from_float<T>(std::nextafter(middle, 0.0f)).bits == bits, "below the middle");
        expect(from_float<T>(std::nextafter(middle, INFINITY)).bits == bits + 1, "above the middle");
    }
    expect(to_float(T{infinity}) == INFINITY && from_float<T>(INFINITY).bits == infinity, "infinity");
    expect(from_float<T>(3.4e38f).bits == infinity, "too large");
    expect(std::isnan(to_float(from_float<T>(NAN))) && std::isnan(to_float(T{0xffff})), "NaN");
}

void numbers() {
    rounding<Half>(0x7c00);
    rounding<BFloat16>(0x7f80);
    expect(from_float<Half>(65519.0f).bits == 0x7bff && from_float<Half>(65520.0f).bits == 0x7c00, "half's last");
    expect(pack<Half>(1.0f, -2.0f) == 0xc0003c00, "pack");
}

DSPARK_KERNEL void bad_barrier_kernel() {
    if (threadIdx.x < 40) sync_block();
}
DSPARK_KERNEL void bad_two_barriers_kernel() {
    if (threadIdx.x < 32) {
        sync_block();
    } else {
        sync_block();
    }
}
DSPARK_KERNEL void bad_shuffle_kernel() {
    if (threadIdx.x % 2 == 0) shuffle_xor(1.0f, 2);
}
DSPARK_KERNEL void bad_load_kernel(const float* from) { load_packet(from + 1); }
DSPARK_KERNEL void bad_wait_kernel(const float* from) { copy_async(shared_memory(), from, true); }
DSPARK_KERNEL void bad_shared_kernel() {
    uint32_t r[4];
    load_matrices(r, shared_memory() + threadIdx.x * 16);
}

// Only AddressSanitizer sees this one.
DSPARK_KERNEL void bad_overrun_kernel() { shared_memory()[threadIdx.x] = 1; }

DSPARK_KERNEL void cost_kernel(int rounds) {
    for (int i = 0; i < rounds; ++i) sync_block();
}
DSPARK_KERNEL void cost_product_kernel(int rounds) {
    float d[4] = {};
    for (int i = 0; i < rounds; ++i) mma_16816<Half>(d, {0, 1, 2, 3}, {4, 5});
}

void cost() {
    auto measure = [](const char* what, void (*kernel)(int), int rounds, int per) {
        const std::clock_t start = std::clock();
        const uint64_t before = shim::switches();
        launch(kernel, dim3(1), 128, 0, nullptr, rounds);
        const double nanoseconds = 1e9 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
        const double switched = static_cast<double>(shim::switches() - before);
        std::printf("%s: %.0f ns, %.1f ns a switch\n", what, nanoseconds / rounds / per, nanoseconds / switched);
    };
    measure("barrier of 128 threads", cost_kernel, 2000, 1);
    measure("matrix product of a warp", cost_product_kernel, 2000, 4);
}

int run(const std::string& name) {
    alignas(16) static float memory[8] = {};
    const std::map<std::string, std::function<void()>> checks = {
        {"barriers", barriers},
        {"missing_barrier_shows", missing_barrier_shows},
        {"warp_shuffles", warp_shuffles},
        {"products", products},
        {"numbers", numbers},
        {"cost", cost},
        {"bad_barrier", [] { launch(bad_barrier_kernel, dim3(1), 64, 0, nullptr); }},
        {"bad_two_barriers", [] { launch(bad_two_barriers_kernel, dim3(1), 64, 0, nullptr); }},
        {"bad_shuffle", [] { launch(bad_shuffle_kernel, dim3(1), 32, 0, nullptr); }},
        {"bad_load", [] { launch(bad_load_kernel, dim3(1), 32, 0, nullptr, memory); }},
        {"bad_wait", [] { launch(bad_wait_kernel, dim3(1), 32, 16, nullptr, memory); }},
        {"bad_shared", [] { launch(bad_shared_kernel, dim3(1), 32, 16 * 31, nullptr); }},
        {"bad_overrun", [] { launch(bad_overrun_kernel, dim3(1), 32, 31, nullptr); }},
    };
    const auto check = checks.find(name);
    if (check == checks.end()) return 2;
    check->second();
    return failures ? 1 : 0;
}

}  // namespace
}  // namespace dspark

int main(int count, char** names) {
    int worst = 0;
    for (int i = 1; i < count; ++i) worst = std::max(worst, dspark::run(names[i]));
    return worst;
}
