#include "markov_argmax_plugin.h"

#include "dspark/markov_argmax.cuh"
#include "fields.h"
#include "messages.h"

namespace dspark {

using namespace nvinfer1;

namespace {

enum Input {
    BASE,
    ANCHORS,
    HIDDEN,
    W1,
    W2,
    HEAD_WEIGHT,
    HEAD_BIAS,
    CONFIDENCE_WEIGHT,
    CONFIDENCE_BIAS,
    D2T,
    NOISE,
    TEMPERATURE
};
enum Output { TOKENS, CONFIDENCE, LOGITS };

const std::vector<Tensor> INPUTS = {
    {"base_logits", Element::weight, {"R", "G", "Vd"}, true},
    {"anchors", Element::int64, {"R"}, true},
    {"hidden", Element::weight, {"R", "G", "H"}, true},
    {"w1", Element::weight, {"V", "r"}, false},
    {"w2", Element::weight, {"Vd", "r"}, false},
    {"head_weight", Element::weight, {"head rows", "head columns"}, false},
    {"head_bias", Element::weight, {"head rows"}, false},
    {"confidence_weight", Element::fp32, {"confidence columns"}, false},
    {"confidence_bias", Element::fp32, {"biases"}, false},
    {"d2t", Element::int64, {"Vd"}, false},
    {"noise", Element::fp32, {"R", "G", "Vd"}, false},
    {"temperature", Element::fp32, {"R"}, false},
};
const std::vector<Tensor> OUTPUTS = {
    {"tokens", Element::int64, {"R", "G"}, true},
    {"confidence", Element::fp32, {"R", "G"}, true},
    {"logits", Element::fp32, {"R", "G", "Vd"}, false},
};

bool head_of(const std::string& name, MarkovHead& head) {
    head = name == "vanilla" ? MarkovHead::vanilla
           : name == "gated" ? MarkovHead::gated
           : name == "rnn"   ? MarkovHead::rnn
                             : MarkovHead::none;
    return head != MarkovHead::none || name == "none";
}

}  // namespace

std::vector<PluginField> MarkovArgmaxPlugin::field_names() {
    return {
        {"head", nullptr, PluginFieldType::kCHAR, 0},
        {"confidence_with_markov", nullptr, PluginFieldType::kINT32, 1},
        {"inputs", nullptr, PluginFieldType::kCHAR, 0},
        {"outputs", nullptr, PluginFieldType::kCHAR, 0},
    };
}

MarkovArgmaxPlugin* MarkovArgmaxPlugin::create(const PluginFieldCollection* given) {
    FieldReader reader(NAME, given);
    Fields fields;
    fields.head = reader.text("head");
    fields.confidence_with_markov = reader.integer("confidence_with_markov", 0, 1);
    fields.inputs = reader.text("inputs");
    fields.outputs = reader.text("outputs");
    if (!reader.ok()) return nullptr;

    const TensorList inputs(reader, "inputs", INPUTS, fields.inputs),
        outputs(reader, "outputs", OUTPUTS, fields.outputs);
    MarkovHead head;
    if (!head_of(fields.head, head)) {
        reader.fault("field 'head' is '%s', it has to be vanilla, gated, rnn or none", fields.head.c_str());
    }
    const auto needs = [&](int input, const char* why) {
        if (!inputs.has(input)) reader.fault("%s needs the input '%s'", why, INPUTS[input].name);
    };
    if (head != MarkovHead::none) {
        needs(W1, "a head");
        needs(W2, "a head");
    }
    if (markov::head_outputs(head) > 0) needs(HEAD_WEIGHT, "a gated or rnn head");
    if (inputs.has(HEAD_BIAS)) needs(HEAD_WEIGHT, "'head_bias'");
    if (inputs.has(CONFIDENCE_BIAS)) needs(CONFIDENCE_WEIGHT, "'confidence_bias'");
    if (fields.confidence_with_markov) {
        needs(CONFIDENCE_WEIGHT, "'confidence_with_markov'");
        needs(W1, "'confidence_with_markov'");
    }
    if (inputs.has(NOISE)) needs(TEMPERATURE, "'noise'");
    if (inputs.has(TEMPERATURE)) needs(NOISE, "'temperature'");
    return reader.ok() ? new MarkovArgmaxPlugin(fields, head, inputs, outputs) : nullptr;
}

std::vector<PluginField> MarkovArgmaxPlugin::fields() const {
    return {
        field_of("head", fields_.head),
        field_of("confidence_with_markov", fields_.confidence_with_markov),
        field_of("inputs", fields_.inputs),
        field_of("outputs", fields_.outputs),
    };
}

bool MarkovArgmaxPlugin::check(const Sizes& sizes) const {
    const int64_t hidden = sizes["H"], rank = sizes["r"];
    const auto equal = [&](const char* tensor, const char* name, int64_t wanted) {
        const int64_t size = sizes[name];
        if (size < 0 || wanted < 0 || size == wanted) return true;
        report("%s: %s has %lld %s, it has to have %lld", NAME, tensor, static_cast<long long>(size), name,
               static_cast<long long>(wanted));
        return false;
    };
    const bool known = hidden >= 0 && rank >= 0, rnn = head_ == MarkovHead::rnn;
    if (inputs_.has(HEAD_WEIGHT) && known && rank > 0) {
        if (!equal("head_weight", "head rows", rnn ? 3 * rank : rank)) return false;
        if (!equal("head_weight", "head columns", hidden + (rnn ? 2 : 1) * rank)) return false;
    }
    const bool with_markov = fields_.confidence_with_markov;
    if (inputs_.has(CONFIDENCE_WEIGHT) && hidden >= 0 && (known || !with_markov)) {
        if (!equal("confidence_weight", "confidence columns", hidden + (with_markov ? rank : 0))) return false;
    }
    return equal("confidence_bias", "biases", 1);
}

MarkovArgmax MarkovArgmaxPlugin::call_of(const PluginTensorDesc* in) const {
    MarkovArgmax call{};
    call.dtype = dtype_of(in[inputs_.position(BASE)].type);
    call.head = head_;
    call.confidence_with_markov = fields_.confidence_with_markov;
    call.requests = size(in, BASE, 0);
    call.gamma = size(in, BASE, 1);
    call.draft_vocab = size(in, BASE, 2);
    call.hidden_size = size(in, HIDDEN, 2);
    call.rank = size(in, W1, 1);
    // Without W1 no token is looked up.
    call.vocab = inputs_.has(W1) ? size(in, W1, 0) : 1;
    return call;
}

size_t MarkovArgmaxPlugin::workspace(const PluginTensorDesc* in) const { return markov_argmax_workspace(call_of(in)); }

int32_t MarkovArgmaxPlugin::enqueue(const PluginTensorDesc* in_desc, const PluginTensorDesc*, const void* const* in,
                                    void* const* out, void* workspace, cudaStream_t stream) noexcept {
    MarkovArgmax call = call_of(in_desc);
    if (call.requests == 0 || call.gamma == 0) return 0;
    call.base_logits = input<void>(in, BASE);
    call.anchors = input<int64_t>(in, ANCHORS);
    call.hidden = input<void>(in, HIDDEN);
    call.w1 = input<void>(in, W1);
    call.w2 = input<void>(in, W2);
    call.head_weight = input<void>(in, HEAD_WEIGHT);
    call.head_bias = input<void>(in, HEAD_BIAS);
    call.confidence_weight = input<float>(in, CONFIDENCE_WEIGHT);
    call.confidence_bias = input<float>(in, CONFIDENCE_BIAS);
    call.d2t = input<int64_t>(in, D2T);
    call.noise = input<float>(in, NOISE);
    call.temperature = input<float>(in, TEMPERATURE);
    call.tokens = output<int64_t>(out, TOKENS);
    call.confidence = output<float>(out, CONFIDENCE);
    call.logits = output<float>(out, LOGITS);
    return ended(markov_argmax(call, workspace, markov_argmax_workspace(call), stream));
}

}  // namespace dspark
