// What the plugins have in common: everything that follows from the tables of their tensors.
//
// One object has all three capabilities (core, build, runtime): it holds nothing but its fields, so a copy costs
// nothing, and the same code checks a node when it is parsed, built and run.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "tensors.h"

namespace dspark {

constexpr const char* PLUGIN_NAMESPACE = "dspark";
constexpr const char* PLUGIN_VERSION = "1";

class Plugin : public nvinfer1::IPluginV3,
               public nvinfer1::IPluginV3OneCore,
               public nvinfer1::IPluginV3OneBuildV2,
               public nvinfer1::IPluginV3OneRuntime {
  public:
    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept final;
    nvinfer1::IPluginV3* clone() noexcept final;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept final { return clone(); }

    const char* getPluginName() const noexcept final { return name_; }
    const char* getPluginVersion() const noexcept final { return PLUGIN_VERSION; }
    const char* getPluginNamespace() const noexcept final { return PLUGIN_NAMESPACE; }
    const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept final;
    const char* getMetadataString() noexcept final;
    const char* getTimingCacheID() noexcept final { return getMetadataString(); }

    int32_t getNbOutputs() const noexcept final { return outputs_.count(); }
    int32_t getOutputDataTypes(nvinfer1::DataType* out, int32_t outs, const nvinfer1::DataType* in,
                               int32_t ins) const noexcept final;
    int32_t getOutputShapes(const nvinfer1::DimsExprs* in, int32_t ins, const nvinfer1::DimsExprs*, int32_t,
                            nvinfer1::DimsExprs* out, int32_t outs, nvinfer1::IExprBuilder& builder) noexcept final;
    bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* all, int32_t ins,
                                   int32_t outs) noexcept final;
    int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, int32_t ins,
                            const nvinfer1::DynamicPluginTensorDesc* out, int32_t outs) noexcept final;
    size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in, int32_t ins,
                            const nvinfer1::DynamicPluginTensorDesc* out, int32_t outs) const noexcept final;
    int32_t onShapeChange(const nvinfer1::PluginTensorDesc* in, int32_t ins, const nvinfer1::PluginTensorDesc* out,
                          int32_t outs) noexcept final;

  protected:
    Plugin(const char* name, TensorList inputs, TensorList outputs) : name_(name), inputs_(inputs), outputs_(outputs) {}
    Plugin(const Plugin& other) : name_(other.name_), inputs_(other.inputs_), outputs_(other.outputs_) {}

    virtual Plugin* copy() const = 0;
    virtual std::vector<nvinfer1::PluginField> fields() const = 0;
    // The rules about sizes that the tables do not say; false and a message where one is broken.
    virtual bool check(const Sizes& sizes) const = 0;
    // Bytes for tensors of these types and sizes.
    virtual size_t workspace(const nvinfer1::PluginTensorDesc* in) const = 0;

    // One size of an input; 0 where the node does not have it.
    int32_t size(const nvinfer1::PluginTensorDesc* in, int which, int axis) const {
        return inputs_.has(which) ? static_cast<int32_t>(in[inputs_.position(which)].dims.d[axis]) : 0;
    }
    template <typename T>
    const T* input(const void* const* in, int which) const {
        return inputs_.has(which) ? static_cast<const T*>(in[inputs_.position(which)]) : nullptr;
    }
    template <typename T>
    T* output(void* const* out, int which) const {
        return outputs_.has(which) ? static_cast<T*>(out[outputs_.position(which)]) : nullptr;
    }
    // What enqueue returns: 0, or 1 with a message.
    int32_t ended(Status status) const noexcept;

    const char* name_;
    TensorList inputs_, outputs_;

  private:
    bool counted(int32_t ins, int32_t outs) const;
    bool check_types(const nvinfer1::DataType* in) const;
    // All sizes: of the tables and of check().
    bool check_sizes(const nvinfer1::Dims* in) const;

    std::vector<nvinfer1::PluginField> serialized_;
    nvinfer1::PluginFieldCollection collection_{};
    std::string metadata_;
};

// P::NAME; P::field_names(): names and types; P::create(fields): a P*, or null after a message.
template <typename P>
class Creator final : public nvinfer1::IPluginCreatorV3One {
  public:
    const char* getPluginName() const noexcept override { return P::NAME; }
    const char* getPluginVersion() const noexcept override { return PLUGIN_VERSION; }
    const char* getPluginNamespace() const noexcept override { return PLUGIN_NAMESPACE; }
    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &fields_; }
    nvinfer1::IPluginV3* createPlugin(const char*, const nvinfer1::PluginFieldCollection* fields,
                                      nvinfer1::TensorRTPhase) noexcept override {
        try {
            return P::create(fields);
        } catch (...) {  // out of memory, and an exception must not cross into TensorRT
            return nullptr;
        }
    }

  private:
    std::vector<nvinfer1::PluginField> names_ = P::field_names();
    nvinfer1::PluginFieldCollection fields_{static_cast<int32_t>(names_.size()), names_.data()};
};

}  // namespace dspark
