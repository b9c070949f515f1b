#include "messages.h"

#include <array>
#include <atomic>
#include <cstdarg>
#include <cstdio>

#include "tensorrt_abi.h"

namespace dspark {
namespace {

constexpr int32_t ERROR = 1;  // nvinfer1::ILogger::Severity::kERROR

using GetLogger = Logger*();

// A few of each, for the TensorRTs that there may be in a process: TensorRT, its lean runtime, TensorRT-RTX.
std::array<std::atomic<LoggerFinder*>, 4> finders{};
std::array<std::atomic<GetLogger*>, 4> getters{};

template <typename T>
void keep(std::array<std::atomic<T*>, 4>& all, T* one) {
    for (std::atomic<T*>& place : all) {
        T* held = nullptr;
        if (place.compare_exchange_strong(held, one) || held == one) return;
    }
}

Logger* find_logger() {
    for (const auto& finder : finders) {
        LoggerFinder* const known = finder.load();
        if (Logger* const logger = known == nullptr ? nullptr : known->findLogger()) return logger;
    }
    for (const auto& getter : getters) {
        GetLogger* const known = getter.load();
        if (Logger* const logger = known == nullptr ? nullptr : known()) return logger;
    }
    return nullptr;
}

}  // namespace

void add_logger_finder(void* finder) noexcept {
    Dl_info owner{};
    // The class of the finder is TensorRT's own: the library that its virtual table lies in tells its version.
    if (finder == nullptr || dladdr(*static_cast<void**>(finder), &owner) == 0) return;
    void* library = dlopen(owner.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    const bool known = library != nullptr && speaks_11(library);
    if (library != nullptr) dlclose(library);
    if (known) keep(finders, static_cast<LoggerFinder*>(finder));
}

void add_logger_of(void* library) noexcept {
    if (auto* const getter = symbol<GetLogger>(library, "getLogger")) keep(getters, getter);
}

void report(const char* format, ...) noexcept {
    char line[1024];
    const int prefix = std::snprintf(line, sizeof line, "dspark: ");
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(line + prefix, sizeof line - prefix, format, arguments);
    va_end(arguments);
    if (Logger* logger = find_logger()) {
        logger->log(ERROR, line);
    } else {
        std::fprintf(stderr, "%s\n", line);
    }
}

}  // namespace dspark
