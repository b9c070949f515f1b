// C entry points of the kernels, for ctypes. Each kernel has its own source beside this file. Pointers are to memory of
// what the kernels run on: the host, over the shim, or a GPU (device_api.cu). The stream is not looked at on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#define DSPARK_HOST_API extern "C" __attribute__((visibility("default")))
