// What a call of a kernel's host function can end with.
#pragma once

#include <cstdint>

namespace dspark {

enum class Status : int32_t {
    ok = 0,
    bad_shape,
    bad_dtype,
    bad_pointer,
    unsupported_head_size,
    workspace_too_small,
    launch_failed,
};

inline const char* status_text(Status status) {
    switch (status) {
        case Status::ok:
            return "ok";
        case Status::bad_shape:
            return "a size is negative, zero where it must not be, does not fit another one, or is too large";
        case Status::bad_dtype:
            return "the dtype is none of fp32, fp16, bf16";
        case Status::bad_pointer:
            return "a pointer is null that must not be, or is not aligned to 16 bytes";
        case Status::unsupported_head_size:
            return "the head size is none of 64, 128, 256, 512";
        case Status::workspace_too_small:
            return "the workspace is smaller than the kernel's workspace function says";
        case Status::launch_failed:
            return "the device refused a launch";
    }
    return "unknown status";
}

}  // namespace dspark
