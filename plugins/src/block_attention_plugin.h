// BlockAttention for TensorRT: a thin shell around dspark/block_attention.cuh. plugins/README.md says what it computes.
//
// The caches are updated in place: their outputs are aliased to their inputs, which a builder allows where its preview
// feature ALIASED_PLUGIN_IO_10_03 is on. Where outputs are other buffers all the same, every call copies both caches.
#pragma once

#include "plugin.h"

namespace dspark {

struct BlockAttention;

class BlockAttentionPlugin final : public Plugin {
  public:
    static constexpr const char* NAME = "BlockAttention";
    static std::vector<nvinfer1::PluginField> field_names();
    static BlockAttentionPlugin* create(const nvinfer1::PluginFieldCollection* fields);

    int32_t getAliasedInput(int32_t output) noexcept override;
    int32_t enqueue(const nvinfer1::PluginTensorDesc* in_desc, const nvinfer1::PluginTensorDesc* out_desc,
                    const void* const* in, void* const* out, void* workspace, cudaStream_t stream) noexcept override;

  protected:
    Plugin* copy() const override { return new BlockAttentionPlugin(*this); }
    std::vector<nvinfer1::PluginField> fields() const override;
    bool check(const Sizes& sizes) const override;
    size_t workspace(const nvinfer1::PluginTensorDesc* in) const override;

  private:
    struct Fields {
        std::string inputs;
        int32_t causal, window;
        float scale, softcap;
    };
    BlockAttentionPlugin(const Fields& fields, TensorList inputs, TensorList outputs)
        : Plugin(NAME, inputs, outputs), fields_(fields) {}

    // Types, sizes and attributes of a call; pointers are not set.
    BlockAttention call_of(const nvinfer1::PluginTensorDesc* in) const;

    const Fields fields_;
};

}  // namespace dspark
