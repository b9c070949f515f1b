// The few classes of TensorRT that the plugins call, as TensorRT 11 and TensorRT-RTX 1.5 lay them out.
//
// What a plugin implements (IPluginV3 and its creator) is the same in TensorRT 10 and 11, so headers of either build
// this library. ILogger, ILoggerFinder and IPluginRegistry are not: in TensorRT 11 they lost or gained virtual
// functions, and a call through the headers of 10 would land in another function. Hence these own declarations, used
// only where the loaded library says that it is new enough (speaks_11).
#pragma once

#include <NvInferRuntime.h>
#include <dlfcn.h>

namespace dspark {

class Logger : public nvinfer1::IVersionedInterface {
  public:
    virtual void log(int32_t severity, const char* text) noexcept = 0;
};

class LoggerFinder : public nvinfer1::IVersionedInterface {
  public:
    virtual Logger* findLogger() = 0;
};

class Registry {
  protected:
    virtual ~Registry() noexcept = default;

  public:
    virtual void setErrorRecorder(nvinfer1::IErrorRecorder* recorder) noexcept = 0;
    virtual nvinfer1::IErrorRecorder* getErrorRecorder() const noexcept = 0;
    virtual bool isParentSearchEnabled() const = 0;
    virtual void setParentSearchEnabled(bool enabled) = 0;
    virtual void* loadLibrary(const char* path) noexcept = 0;
    virtual void deregisterLibrary(void* library) noexcept = 0;
    virtual bool registerCreator(nvinfer1::IPluginCreatorInterface& creator, const char* space) noexcept = 0;
    virtual nvinfer1::IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept = 0;
    virtual nvinfer1::IPluginCreatorInterface* getCreator(const char* name, const char* version,
                                                          const char* space) noexcept = 0;
};

template <typename Function>
Function* symbol(void* library, const char* name) {
    return reinterpret_cast<Function*>(dlsym(library, name));
}

// Whether a library of TensorRT's, opened by dlopen, has the classes above. TensorRT-RTX counts its versions from 1.
inline bool speaks_11(void* library) {
    const auto major = symbol<int32_t()>(library, "getInferLibMajorVersion");
    const auto minor = symbol<int32_t()>(library, "getInferLibMinorVersion");
    if (major == nullptr || minor == nullptr) return false;
    return major() >= 11 || (major() == 1 && minor() >= 5);
}

}  // namespace dspark
