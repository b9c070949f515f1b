// Reading and writing the fields of a plugin: its attributes in the ONNX node, and what an engine file keeps of it.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

namespace dspark {

// Takes the fields one by one; every fault is reported, and the first one makes ok() false.
class FieldReader {
  public:
    FieldReader(const char* plugin, const nvinfer1::PluginFieldCollection* given);

    int32_t integer(const char* name, int32_t least, int32_t most);
    float number(const char* name, float least, bool above);  // finite, >= least, or > least if above
    std::string text(const char* name);

    // Call it last: a field that nobody asked for is a fault too.
    bool ok();

    // For what a plugin finds wrong itself; the message names the plugin.
    void fault(const char* format, ...) __attribute__((format(printf, 2, 3)));

  private:
    const nvinfer1::PluginField* find(const char* name, nvinfer1::PluginFieldType type);

    const char* plugin_;
    const nvinfer1::PluginFieldCollection* given_;
    std::vector<bool> taken_;
    bool ok_ = true;
};

// Fields that point to a plugin's own members, which have to outlive them.
inline nvinfer1::PluginField field_of(const char* name, const int32_t& value) {
    return {name, &value, nvinfer1::PluginFieldType::kINT32, 1};
}
inline nvinfer1::PluginField field_of(const char* name, const float& value) {
    return {name, &value, nvinfer1::PluginFieldType::kFLOAT32, 1};
}
inline nvinfer1::PluginField field_of(const char* name, const std::string& value) {
    // With the final zero, as the ONNX parser passes strings; so an empty one has a length too.
    return {name, value.c_str(), nvinfer1::PluginFieldType::kCHAR, static_cast<int32_t>(value.size() + 1)};
}

}  // namespace dspark
