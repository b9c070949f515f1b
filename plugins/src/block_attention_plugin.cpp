#include "block_attention_plugin.h"

#include <algorithm>

#include "dspark/block_attention.cuh"
#include "fields.h"
#include "messages.h"
#include "on_device.h"

namespace dspark {

using namespace nvinfer1;

namespace {

enum Input { Q, K, V, KEY_CACHE, VALUE_CACHE, ROW_START, LENGTH, PAGES, CONTEXT_K, CONTEXT_V, CONTEXT_START, SINKS };
enum Output { OUT, KEY_CACHE_OUT, VALUE_CACHE_OUT };

const std::vector<Tensor> INPUTS = {
    {"q", Element::weight, {"T", "Hq", "D"}, true},
    {"k", Element::weight, {"T", "Hkv", "D"}, true},
    {"v", Element::weight, {"T", "Hkv", "D"}, true},
    {"key_cache", Element::weight, {"P", "Hkv", "C", "D"}, true},
    {"value_cache", Element::weight, {"P", "Hkv", "C", "D"}, true},
    {"row_start", Element::int32, {{"R", 1}}, true},
    {"length", Element::int32, {"R"}, true},
    {"pages", Element::int32, {"R", "N"}, true},
    {"context_k", Element::weight, {"Tc", "Hkv", "D"}, false},
    {"context_v", Element::weight, {"Tc", "Hkv", "D"}, false},
    {"context_start", Element::int32, {{"R", 1}}, false},
    {"sinks", Element::fp32, {"Hq"}, false},
};
const std::vector<Tensor> OUTPUTS = {
    {"out", Element::weight, {"T", "Hq", "D"}, true},
    {"key_cache_out", Element::weight, {"P", "Hkv", "C", "D"}, true},
    {"value_cache_out", Element::weight, {"P", "Hkv", "C", "D"}, true},
};

// Thread blocks that fill the largest device: the workspace is for so many, whatever device the engine is built on.
constexpr int32_t MOST_TARGET_BLOCKS = 384;

}  // namespace

std::vector<PluginField> BlockAttentionPlugin::field_names() {
    return {
        {"causal", nullptr, PluginFieldType::kINT32, 1},  {"window", nullptr, PluginFieldType::kINT32, 1},
        {"scale", nullptr, PluginFieldType::kFLOAT32, 1}, {"softcap", nullptr, PluginFieldType::kFLOAT32, 1},
        {"inputs", nullptr, PluginFieldType::kCHAR, 0},
    };
}

BlockAttentionPlugin* BlockAttentionPlugin::create(const PluginFieldCollection* given) {
    FieldReader reader(NAME, given);
    Fields fields;
    fields.causal = reader.integer("causal", 0, 1);
    fields.window = reader.integer("window", 0, INT32_MAX);
    fields.scale = reader.number("scale", 0, true);
    fields.softcap = reader.number("softcap", 0, false);
    fields.inputs = reader.text("inputs");
    if (!reader.ok()) return nullptr;

    const TensorList inputs(reader, "inputs", INPUTS, fields.inputs);
    const TensorList outputs(reader, "outputs", OUTPUTS, "out,key_cache_out,value_cache_out");
    if (inputs.has(CONTEXT_K) != inputs.has(CONTEXT_V) || inputs.has(CONTEXT_K) != inputs.has(CONTEXT_START)) {
        reader.fault("of the inputs 'context_k', 'context_v' and 'context_start' there are all or none");
    }
    return reader.ok() ? new BlockAttentionPlugin(fields, inputs, outputs) : nullptr;
}

std::vector<PluginField> BlockAttentionPlugin::fields() const {
    return {
        field_of("causal", fields_.causal),   field_of("window", fields_.window), field_of("scale", fields_.scale),
        field_of("softcap", fields_.softcap), field_of("inputs", fields_.inputs),
    };
}

int32_t BlockAttentionPlugin::getAliasedInput(int32_t output) noexcept {
    return output == KEY_CACHE_OUT     ? inputs_.position(KEY_CACHE)
           : output == VALUE_CACHE_OUT ? inputs_.position(VALUE_CACHE)
                                       : -1;
}

bool BlockAttentionPlugin::check(const Sizes& sizes) const {
    const int64_t depth = sizes["D"], heads = sizes["Hq"], kv_heads = sizes["Hkv"];
    if (depth >= 0 && depth != 64 && depth != 128 && depth != 256 && depth != 512) {
        report("%s: the head size is %lld, it has to be 64, 128, 256 or 512", NAME, static_cast<long long>(depth));
        return false;
    }
    if (heads >= 0 && kv_heads >= 0 && (kv_heads == 0 || heads % kv_heads != 0)) {
        report("%s: %lld query heads are not a multiple of %lld key/value heads", NAME, static_cast<long long>(heads),
               static_cast<long long>(kv_heads));
        return false;
    }
    return true;
}

BlockAttention BlockAttentionPlugin::call_of(const PluginTensorDesc* in) const {
    BlockAttention call{};
    call.dtype = dtype_of(in[inputs_.position(Q)].type);
    call.rows = size(in, Q, 0);
    call.context_rows = size(in, CONTEXT_K, 0);
    call.requests = size(in, LENGTH, 0);
    call.heads = size(in, Q, 1);
    call.kv_heads = size(in, K, 1);
    call.head_size = size(in, Q, 2);
    call.cache_pages = size(in, KEY_CACHE, 0);
    call.request_pages = size(in, PAGES, 1);
    call.page_rows = size(in, KEY_CACHE, 2);
    call.causal = fields_.causal;
    call.window = fields_.window;
    call.scale = fields_.scale;
    call.softcap = fields_.softcap;
    call.target_blocks = MOST_TARGET_BLOCKS;
    return call;
}

size_t BlockAttentionPlugin::workspace(const PluginTensorDesc* in) const {
    return block_attention_workspace(call_of(in));
}

int32_t BlockAttentionPlugin::enqueue(const PluginTensorDesc* in_desc, const PluginTensorDesc*, const void* const* in,
                                      void* const* out, void* workspace, cudaStream_t stream) noexcept {
    BlockAttention call = call_of(in_desc);
    const size_t workspace_bytes = block_attention_workspace(call);
    call.target_blocks = std::min(2 * multiprocessors(), MOST_TARGET_BLOCKS);
    call.q = input<void>(in, Q);
    call.k = input<void>(in, K);
    call.v = input<void>(in, V);
    call.row_start = input<int32_t>(in, ROW_START);
    call.length = input<int32_t>(in, LENGTH);
    call.pages = input<int32_t>(in, PAGES);
    if (call.context_rows > 0) {  // an empty tensor may have any address
        call.context_k = input<void>(in, CONTEXT_K);
        call.context_v = input<void>(in, CONTEXT_V);
        call.context_start = input<int32_t>(in, CONTEXT_START);
    }
    call.sinks = input<float>(in, SINKS);
    call.out = output<void>(out, OUT);
    call.key_cache = output<void>(out, KEY_CACHE_OUT);
    call.value_cache = output<void>(out, VALUE_CACHE_OUT);

    const size_t cache_bytes = size_of(call.dtype) * call.cache_pages * call.kv_heads * call.page_rows * call.head_size;
    Status status = copy_unless_same(call.key_cache, input<void>(in, KEY_CACHE), cache_bytes, stream);
    if (status == Status::ok) {
        status = copy_unless_same(call.value_cache, input<void>(in, VALUE_CACHE), cache_bytes, stream);
    }
    if (status == Status::ok) status = block_attention(call, workspace, workspace_bytes, stream);
    return ended(status);
}

}  // namespace dspark
