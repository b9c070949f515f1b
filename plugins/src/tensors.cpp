#include "tensors.h"

#include <cstring>

#include "fields.h"
#include "messages.h"

namespace dspark {

using nvinfer1::DataType;

TensorList::TensorList(FieldReader& fields, const char* field, const std::vector<Tensor>& table,
                       const std::string& names)
    : table_(&table) {
    position_.fill(-1);
    for (size_t from = 0; from <= names.size() && !names.empty();) {
        size_t end = names.find(',', from);
        if (end == std::string::npos) end = names.size();
        const std::string name = names.substr(from, end - from);
        from = end + 1;
        size_t which = 0;
        while (which < table.size() && name != table[which].name) which++;
        if (which == table.size()) {
            fields.fault("field '%s' names '%s', which is not one of them", field, name.c_str());
        } else if (position_[which] >= 0) {
            fields.fault("field '%s' names '%s' twice", field, name.c_str());
        } else {
            position_[which] = static_cast<int8_t>(count_);
            which_[count_++] = static_cast<int8_t>(which);
        }
    }
    for (size_t which = 0; which < table.size(); which++) {
        if (table[which].required && position_[which] < 0) {
            fields.fault("field '%s' does not name '%s'", field, table[which].name);
        }
    }
}

const Sizes::Known* Sizes::find(const char* name) const {
    for (int i = 0; i < count_; i++) {
        if (std::strcmp(known_[i].name, name) == 0) return &known_[i];
    }
    return nullptr;
}

bool Sizes::add(const Tensor& tensor, int32_t rank, const int64_t* sizes) {
    if (rank != static_cast<int32_t>(tensor.shape.size())) {
        report("%s: %s has %d dimensions, it has to have %zu", plugin_, tensor.name, rank, tensor.shape.size());
        return false;
    }
    for (int32_t axis = 0; axis < rank; axis++) {
        if (sizes[axis] < 0) continue;
        const Size& size = tensor.shape[axis];
        const int64_t given = sizes[axis] - size.plus;
        const Known* known = find(size.name);
        if (known == nullptr) {
            known_[count_++] = {size.name, given, tensor.name};
        } else if (known->size != given) {
            report("%s: %s has %s = %lld, %s has %lld", plugin_, tensor.name, size.name, static_cast<long long>(given),
                   known->tensor, static_cast<long long>(known->size));
            return false;
        }
    }
    return true;
}

int64_t Sizes::operator[](const char* name) const {
    const Known* known = find(name);
    return known == nullptr ? -1 : known->size;
}

const char* name_of(DataType type) {
    switch (type) {
        case DataType::kFLOAT:
            return "fp32";
        case DataType::kHALF:
            return "fp16";
        case DataType::kBF16:
            return "bf16";
        case DataType::kINT32:
            return "int32";
        case DataType::kINT64:
            return "int64";
        default:
            return "another type";
    }
}

const char* name_of(Element element) {
    switch (element) {
        case Element::weight:
            return "fp32, fp16 or bf16, like the other weights";
        case Element::fp32:
            return "fp32";
        case Element::int32:
            return "int32";
        case Element::int64:
            return "int64";
    }
    return "";
}

bool fits(Element element, DataType type, DataType weight) {
    switch (element) {
        case Element::weight:
            return type == weight && (type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16);
        case Element::fp32:
            return type == DataType::kFLOAT;
        case Element::int32:
            return type == DataType::kINT32;
        case Element::int64:
            return type == DataType::kINT64;
    }
    return false;
}

DType dtype_of(DataType type) {
    return type == DataType::kHALF ? DType::fp16 : type == DataType::kBF16 ? DType::bf16 : DType::fp32;
}

}  // namespace dspark
