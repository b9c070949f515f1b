#include "fields.h"

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "messages.h"

namespace dspark {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

namespace {

const char* name_of(PluginFieldType type) {
    switch (type) {
        case PluginFieldType::kFLOAT16:
            return "FLOAT16";
        case PluginFieldType::kFLOAT32:
            return "FLOAT32";
        case PluginFieldType::kFLOAT64:
            return "FLOAT64";
        case PluginFieldType::kINT8:
            return "INT8";
        case PluginFieldType::kINT16:
            return "INT16";
        case PluginFieldType::kINT32:
            return "INT32";
        case PluginFieldType::kINT64:
            return "INT64";
        case PluginFieldType::kCHAR:
            return "CHAR";
        default:
            return "another type";
    }
}

}  // namespace

FieldReader::FieldReader(const char* plugin, const nvinfer1::PluginFieldCollection* given)
    : plugin_(plugin), given_(given), taken_(given == nullptr ? 0 : given->nbFields, false) {}

void FieldReader::fault(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    report("%s: %s", plugin_, text);
    ok_ = false;
}

const PluginField* FieldReader::find(const char* name, PluginFieldType type) {
    const PluginField* found = nullptr;
    for (size_t i = 0; i < taken_.size(); i++) {
        const PluginField& field = given_->fields[i];
        if (field.name == nullptr || std::strcmp(field.name, name) != 0) continue;
        taken_[i] = true;
        if (found != nullptr) return fault("field '%s' is given twice", name), nullptr;
        found = &field;
    }
    if (found == nullptr) return fault("field '%s' is missing", name), nullptr;
    if (found->type != type) {
        return fault("field '%s' is of type %s, it has to be %s", name, name_of(found->type), name_of(type)), nullptr;
    }
    if (type != PluginFieldType::kCHAR && found->length != 1) {
        return fault("field '%s' has %d values, it has to have 1", name, found->length), nullptr;
    }
    if (found->data == nullptr && found->length > 0) return fault("field '%s' has no data", name), nullptr;
    return found;
}

int32_t FieldReader::integer(const char* name, int32_t least, int32_t most) {
    const PluginField* field = find(name, PluginFieldType::kINT32);
    if (field == nullptr) return least;
    int32_t value;
    std::memcpy(&value, field->data, sizeof value);
    if (value < least || value > most) fault("field '%s' is %d, it has to be %d to %d", name, value, least, most);
    return value;
}

float FieldReader::number(const char* name, float least, bool above) {
    const PluginField* field = find(name, PluginFieldType::kFLOAT32);
    if (field == nullptr) return least;
    float value;
    std::memcpy(&value, field->data, sizeof value);
    if (!std::isfinite(value) || value < least || (above && value == least)) {
        fault("field '%s' is %g, it has to be a finite number %s %g", name, value, above ? "above" : "from", least);
    }
    return value;
}

std::string FieldReader::text(const char* name) {
    const PluginField* field = find(name, PluginFieldType::kCHAR);
    if (field == nullptr || field->length <= 0) return {};
    const char* data = static_cast<const char*>(field->data);
    return {data, strnlen(data, static_cast<size_t>(field->length))};
}

bool FieldReader::ok() {
    for (size_t i = 0; i < taken_.size(); i++) {
        const char* name = given_->fields[i].name;
        if (!taken_[i]) fault("there is no field '%s'", name == nullptr ? "" : name);
    }
    return ok_;
}

}  // namespace dspark
