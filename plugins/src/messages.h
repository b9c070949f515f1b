// Where the plugins' messages go.
#pragma once

namespace dspark {

// One line, as an error: to TensorRT's logger, or to stderr where there is none to be found.
void report(const char* format, ...) noexcept __attribute__((format(printf, 1, 2)));

// TensorRT hands a finder over when it loads the library.
void add_logger_finder(void* finder) noexcept;

// Without one: the logger that a library of TensorRT's has in general. The library must be one that speaks_11().
void add_logger_of(void* library) noexcept;

}  // namespace dspark
