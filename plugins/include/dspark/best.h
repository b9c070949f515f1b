// The best of many scores as one 64-bit maximum: the highest score, the lowest index among equals.
#pragma once

#include "dspark/device.h"

namespace dspark {

// What pack_best gives for a score that cannot win. It is also what a maximum starts from, and stands for index 0.
constexpr uint64_t NO_BEST = 0;

// The score's bits in an order that unsigned numbers have, above the index's complement. NaN and -inf never win.
DSPARK_DEVICE uint64_t pack_best(float score, uint32_t index) {
    if (!(score > -INFINITY)) return NO_BEST;
    const uint32_t bits = bits_of(score == 0.0f ? 0.0f : score);  // -0 and 0 are equal scores
    const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ordered) << 32 | ~index;
}

DSPARK_DEVICE uint32_t best_index(uint64_t best) { return best == NO_BEST ? 0 : ~static_cast<uint32_t>(best); }

DSPARK_DEVICE float best_score(uint64_t best) {
    if (best == NO_BEST) return -INFINITY;
    const uint32_t ordered = static_cast<uint32_t>(best >> 32);
    return float_of(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

DSPARK_DEVICE uint64_t better(uint64_t one, uint64_t other) { return one > other ? one : other; }

// Of a full warp; every lane gets the result.
DSPARK_DEVICE uint64_t warp_best(uint64_t best) {
    DSPARK_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) best = better(best, shuffle_xor(best, mask));
    return best;
}

DSPARK_DEVICE float warp_sum(float value) {
    DSPARK_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

}  // namespace dspark
