// What lanes compute together (matrix loads and products), and the 16-bit number formats.
#include "dspark/device.h"

namespace dspark::shim {

// Half: 1 sign, 5 exponent, 10 fraction bits.
float half_to_float(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // infinity, NaN
    // Shifted into place the exponent is too small by 112; the product is exact, subnormal numbers included.
    return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
}

uint16_t half_from_float(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return sign | 0x7e00;   // NaN
    if (rest >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536 or more: infinity
    if (rest < 0x38800000) {                       // below 2^-14: a multiple of 2^-24
        return sign |
               (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f));  // 0.5's last bit is 2^-24, the sum rounds to even
    }
    return sign | ((rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13);
}

float bfloat16_to_float(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

uint16_t bfloat16_from_float(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;  // NaN stays NaN
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

namespace {

void load(void* const* given, bool transposed) {
    for (int lane = 0; lane < 32; ++lane) {
        const MatrixLoad* to = static_cast<const MatrixLoad*>(given[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            auto element = [&](int row, int column) -> uint32_t {
                const void* from = static_cast<const MatrixLoad*>(given[8 * i + row])->row;
                return static_cast<const uint16_t*>(from)[column];
            };
            to->r[i] = transposed ? element(2 * t, g) | element(2 * t + 1, g) << 16
                                  : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
        }
    }
}

// The formulas of the PTX ISA, element by element.
template <float (*to_float)(uint16_t)>
void mma(void* const* given) {
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const Mma* from = static_cast<const Mma*>(given[lane]);
        const int group = lane >> 2, thread = lane % 4;
        for (int i = 0; i < 8; ++i) {
            const int row = i < 2 || (4 <= i && i < 6) ? group : group + 8;
            const int column = thread * 2 + (i & 1) + (i < 4 ? 0 : 8);
            a[row][column] = to_float(from->a[i / 2] >> 16 * (i % 2));
        }
        for (int i = 0; i < 4; ++i) {
            b[thread * 2 + (i & 1) + (i < 2 ? 0 : 8)][group] = to_float(from->b[i / 2] >> 16 * (i % 2));
            d[i < 2 ? group : group + 8][thread * 2 + (i & 1)] = from->d[i];
        }
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 16; ++k) {
            for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        const Mma* to = static_cast<const Mma*>(given[lane]);
        const int group = lane >> 2, thread = lane % 4;
        for (int i = 0; i < 4; ++i) to->d[i] = d[i < 2 ? group : group + 8][thread * 2 + (i & 1)];
    }
}

}  // namespace

void load_matrices(void* const* given) { load(given, false); }
void load_matrices_transposed(void* const* given) { load(given, true); }
void mma_half(void* const* given) { mma<half_to_float>(given); }
void mma_bfloat16(void* const* given) { mma<bfloat16_to_float>(given); }

}  // namespace dspark::shim
