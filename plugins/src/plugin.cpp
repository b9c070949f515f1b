#include "plugin.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "messages.h"

namespace dspark {

using namespace nvinfer1;

IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
    switch (type) {
        case PluginCapabilityType::kCORE:
            return static_cast<IPluginV3OneCore*>(this);
        case PluginCapabilityType::kBUILD:
            return static_cast<IPluginV3OneBuildV2*>(this);
        case PluginCapabilityType::kRUNTIME:
            return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* Plugin::clone() noexcept {
    try {
        return copy();
    } catch (...) {
        return nullptr;
    }
}

const PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
    serialized_ = fields();
    collection_ = {static_cast<int32_t>(serialized_.size()), serialized_.data()};
    return &collection_;
}

// Shown by TensorRT's engine inspector, and a key of its timing cache: "causal=1 window=0 ..."
const char* Plugin::getMetadataString() noexcept {
    metadata_.clear();
    for (const PluginField& field : fields()) {
        char text[32] = "";
        if (field.type == PluginFieldType::kINT32) {
            std::snprintf(text, sizeof text, "%d", *static_cast<const int32_t*>(field.data));
        } else if (field.type == PluginFieldType::kFLOAT32) {
            std::snprintf(text, sizeof text, "%.9g", *static_cast<const float*>(field.data));
        }
        const bool string = field.type == PluginFieldType::kCHAR;
        metadata_ += (metadata_.empty() ? "" : " ") + std::string(field.name) + "=";
        metadata_ += string ? static_cast<const char*>(field.data) : text;
    }
    return metadata_.c_str();
}

bool Plugin::counted(int32_t ins, int32_t outs) const {
    if (ins != inputs_.count()) {
        report("%s: the node has %d inputs, its field 'inputs' names %d", name_, ins, inputs_.count());
    } else if (outs != outputs_.count()) {
        report("%s: the node has %d outputs, it has to have %d", name_, outs, outputs_.count());
    }
    return ins == inputs_.count() && outs == outputs_.count();
}

bool Plugin::check_types(const DataType* in) const {
    for (int i = 0; i < inputs_.count(); i++) {
        const Tensor& tensor = inputs_.at(i);
        // The first input of every op is a weight.
        if (fits(tensor.element, in[i], in[inputs_.position(0)])) continue;
        report("%s: %s is %s, it has to be %s", name_, tensor.name, name_of(in[i]), name_of(tensor.element));
        return false;
    }
    return true;
}

bool Plugin::check_sizes(const Dims* in) const {
    Sizes sizes(name_);
    for (int i = 0; i < inputs_.count(); i++) {
        if (!sizes.add(inputs_.at(i), in[i].nbDims, in[i].d)) return false;
    }
    return check(sizes);
}

int32_t Plugin::getOutputDataTypes(DataType* out, int32_t outs, const DataType* in, int32_t ins) const noexcept {
    if (!counted(ins, outs) || !check_types(in)) return 1;
    for (int i = 0; i < outs; i++) {
        switch (outputs_.at(i).element) {
            case Element::weight:
                out[i] = in[inputs_.position(0)];
                break;
            case Element::fp32:
                out[i] = DataType::kFLOAT;
                break;
            case Element::int32:
                out[i] = DataType::kINT32;
                break;
            case Element::int64:
                out[i] = DataType::kINT64;
                break;
        }
    }
    return 0;
}

int32_t Plugin::getOutputShapes(const DimsExprs* in, int32_t ins, const DimsExprs*, int32_t, DimsExprs* out,
                                int32_t outs, IExprBuilder&) noexcept {
    if (!counted(ins, outs)) return 1;
    Dims known[MAX_TENSORS];
    for (int i = 0; i < ins; i++) {
        known[i].nbDims = in[i].nbDims;
        for (int axis = 0; axis < in[i].nbDims; axis++) {
            const IDimensionExpr* size = in[i].d[axis];
            known[i].d[axis] = size->isConstant() ? size->getConstantValue() : -1;
        }
    }
    if (!check_sizes(known)) return 1;
    // Every size of an output is one of an input that the node must have.
    const auto expression = [&](const Size& wanted) -> const IDimensionExpr* {
        for (int i = 0; i < ins; i++) {
            const std::vector<Size>& shape = inputs_.at(i).shape;
            for (size_t axis = 0; axis < shape.size(); axis++) {
                if (shape[axis].plus == 0 && std::strcmp(shape[axis].name, wanted.name) == 0) return in[i].d[axis];
            }
        }
        return nullptr;
    };
    for (int i = 0; i < outs; i++) {
        const std::vector<Size>& shape = outputs_.at(i).shape;
        out[i].nbDims = static_cast<int32_t>(shape.size());
        for (size_t axis = 0; axis < shape.size(); axis++) out[i].d[axis] = expression(shape[axis]);
    }
    return 0;
}

bool Plugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* all, int32_t ins,
                                       int32_t outs) noexcept {
    if (!counted(ins, outs)) return false;
    const bool is_input = position < ins;
    const Tensor& tensor = is_input ? inputs_.at(position) : outputs_.at(position - ins);
    // Only what is before `position` may be looked at; until the first input comes, any weight will do.
    const int first = inputs_.position(0);
    const DataType own = all[position].desc.type, weight = position < first ? own : all[first].desc.type;
    return all[position].desc.format == TensorFormat::kLINEAR && fits(tensor.element, own, weight);
}

int32_t Plugin::configurePlugin(const DynamicPluginTensorDesc* in, int32_t ins, const DynamicPluginTensorDesc*,
                                int32_t outs) noexcept {
    if (!counted(ins, outs)) return 1;
    Dims known[MAX_TENSORS];
    for (int i = 0; i < ins; i++) known[i] = in[i].desc.dims;
    return check_sizes(known) ? 0 : 1;
}

size_t Plugin::getWorkspaceSize(const DynamicPluginTensorDesc* in, int32_t ins, const DynamicPluginTensorDesc*,
                                int32_t) const noexcept {
    PluginTensorDesc largest[MAX_TENSORS];
    for (int i = 0; i < std::min(ins, inputs_.count()); i++) {
        largest[i] = in[i].desc;
        largest[i].dims = in[i].max;
    }
    return workspace(largest);
}

int32_t Plugin::onShapeChange(const PluginTensorDesc* in, int32_t ins, const PluginTensorDesc*, int32_t outs) noexcept {
    if (!counted(ins, outs)) return 1;
    DataType types[MAX_TENSORS];
    Dims known[MAX_TENSORS];
    for (int i = 0; i < ins; i++) types[i] = in[i].type, known[i] = in[i].dims;
    return check_types(types) && check_sizes(known) ? 0 : 1;
}

int32_t Plugin::ended(Status status) const noexcept {
    if (status == Status::ok) return 0;
    report("%s: %s", name_, status_text(status));
    return 1;
}

}  // namespace dspark
