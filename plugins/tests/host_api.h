// C entry points of the host build, for ctypes. Each kernel has its own source beside this file.
#pragma once

#include <cstddef>
#include <cstdint>

#define DSPARK_HOST_API extern "C" __attribute__((visibility("default")))
