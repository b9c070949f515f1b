// The element types of tensors, as values and as C++ types.
#pragma once

#include "dspark/device.h"

namespace dspark {

enum class DType : int32_t { fp32 = 0, fp16 = 1, bf16 = 2 };

inline bool is_dtype(DType dtype) { return dtype == DType::fp32 || dtype == DType::fp16 || dtype == DType::bf16; }

inline size_t size_of(DType dtype) { return dtype == DType::fp32 ? 4 : 2; }

// Calls use(T{}) with the C++ type of a dtype that is_dtype: `with_dtype(d, [&](auto zero) { use<decltype(zero)>();
// })`.
template <typename Use>
auto with_dtype(DType dtype, Use use) {
    switch (dtype) {
        case DType::fp16:
            return use(Half{});
        case DType::bf16:
            return use(BFloat16{});
        default:
            return use(float{});
    }
}

}  // namespace dspark
