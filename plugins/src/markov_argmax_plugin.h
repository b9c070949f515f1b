// MarkovArgmax for TensorRT: a thin shell around dspark/markov_argmax.cuh. plugins/README.md says what it computes.
#pragma once

#include "plugin.h"

namespace dspark {

enum class MarkovHead : int32_t;
struct MarkovArgmax;

class MarkovArgmaxPlugin final : public Plugin {
  public:
    static constexpr const char* NAME = "MarkovArgmax";
    static std::vector<nvinfer1::PluginField> field_names();
    static MarkovArgmaxPlugin* create(const nvinfer1::PluginFieldCollection* fields);

    int32_t getAliasedInput(int32_t) noexcept override { return -1; }
    int32_t enqueue(const nvinfer1::PluginTensorDesc* in_desc, const nvinfer1::PluginTensorDesc* out_desc,
                    const void* const* in, void* const* out, void* workspace, cudaStream_t stream) noexcept override;

  protected:
    Plugin* copy() const override { return new MarkovArgmaxPlugin(*this); }
    std::vector<nvinfer1::PluginField> fields() const override;
    bool check(const Sizes& sizes) const override;
    size_t workspace(const nvinfer1::PluginTensorDesc* in) const override;

  private:
    struct Fields {
        std::string inputs, outputs, head;
        int32_t confidence_with_markov;
    };
    MarkovArgmaxPlugin(const Fields& fields, MarkovHead head, TensorList inputs, TensorList outputs)
        : Plugin(NAME, inputs, outputs), fields_(fields), head_(head) {}

    // Types, sizes and attributes of a call; pointers are not set.
    MarkovArgmax call_of(const nvinfer1::PluginTensorDesc* in) const;

    const Fields fields_;
    const MarkovHead head_;
};

}  // namespace dspark
