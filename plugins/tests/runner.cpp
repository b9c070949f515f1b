// Plays TensorRT's part for one plugin: creates it from fields, clones it, serialises it and builds it again from what
// it serialised, asks for types, shapes, formats and workspace, and enqueues it for one set of shapes after another.
//
//   runner LIBRARY [--separate] [--registry TENSORRT] < case > results
//
// The case (tests/plugins/runner_case.py writes it) is text lines; a tensor's bytes follow its line:
//
//   plugin BlockAttention
//   int causal 1 | float scale 0.25 | text inputs q,k,v,...
//   call
//   in bf16 5 4 64                type and sizes, then the bytes and a newline; inputs in the order of the node
//   end
//
// The results are one line `out TYPE SIZES...` and the bytes for each output of each call. Everything is enqueued twice
// (on a device also through a CUDA graph) and has to give the same bytes. --separate: outputs are never the buffers of
// inputs, as without TensorRT's aliasing. --registry: the library is loaded, and the plugin found, by the plugin
// registry of that library of TensorRT's.
//
// Exit status: 0; 2: the plugin refused its fields, types or shapes, with its message on stderr; 1: it broke a rule.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "../src/tensorrt_abi.h"
#include "runner_memory.h"

using namespace nvinfer1;
using runner::Buffer;
using runner::die;

namespace {

[[noreturn]] void refused(const char* by) {
    std::fprintf(stderr, "runner: refused by %s\n", by);
    std::exit(2);
}

struct Type {
    const char* name;
    DataType type;
    size_t bytes;
};
constexpr Type TYPES[] = {{"fp32", DataType::kFLOAT, 4},
                          {"fp16", DataType::kHALF, 2},
                          {"bf16", DataType::kBF16, 2},
                          {"int32", DataType::kINT32, 4},
                          {"int64", DataType::kINT64, 8}};

const Type& type_of(const std::string& name) {
    for (const Type& type : TYPES) {
        if (name == type.name) return type;
    }
    die("unknown type ", name.c_str());
}
const Type& type_of(DataType wanted) {
    for (const Type& type : TYPES) {
        if (wanted == type.type) return type;
    }
    die("the plugin made an output of an unknown type");
}

struct Tensor {
    DataType type;
    Dims dims;
    std::vector<char> bytes;
};
using Call = std::vector<Tensor>;

size_t bytes_of(DataType type, const Dims& dims) {
    size_t bytes = type_of(type).bytes;
    for (int32_t i = 0; i < dims.nbDims; i++) bytes *= static_cast<size_t>(dims.d[i]);
    return bytes;
}

struct Case {
    std::string plugin;
    std::vector<std::string> names, texts;
    std::vector<int32_t> ints;
    std::vector<float> floats;
    std::vector<PluginField> fields;  // data points into the above
    std::vector<Call> calls;
};

std::unique_ptr<Case> read_case(std::istream& from) {
    auto made = std::make_unique<Case>();
    for (auto* vector : {&made->names, &made->texts}) vector->reserve(64);
    made->ints.reserve(64);
    made->floats.reserve(64);
    for (std::string line; std::getline(from, line) && line != "end";) {
        std::istringstream words(line);
        std::string kind, name;
        words >> kind;
        if (kind == "call") {
            made->calls.emplace_back();
            continue;
        }
        words >> name;
        if (kind == "plugin") {
            made->plugin = name;
        } else if (kind == "in") {
            Tensor tensor{type_of(name).type, {}, {}};
            while (words >> tensor.dims.d[tensor.dims.nbDims]) tensor.dims.nbDims++;
            tensor.bytes.resize(bytes_of(tensor.type, tensor.dims));
            from.read(tensor.bytes.data(), static_cast<std::streamsize>(tensor.bytes.size()));
            from.get();
            made->calls.back().push_back(std::move(tensor));
        } else {
            made->names.push_back(name);
            const char* field = made->names.back().c_str();
            if (kind == "int") {
                words >> made->ints.emplace_back();
                made->fields.push_back({field, &made->ints.back(), PluginFieldType::kINT32, 1});
            } else if (kind == "float") {
                words >> made->floats.emplace_back();
                made->fields.push_back({field, &made->floats.back(), PluginFieldType::kFLOAT32, 1});
            } else if (kind == "text") {
                words >> made->texts.emplace_back();
                const std::string& text = made->texts.back();
                const int32_t length = static_cast<int32_t>(text.size() + 1);
                made->fields.push_back({field, text.c_str(), PluginFieldType::kCHAR, length});
            } else {
                die("unknown line ", line.c_str());
            }
        }
    }
    if (!from) die("the case ends early");
    return made;
}

// What TensorRT gives getOutputShapes: sizes that are known, or stand for something.
struct Expression : apiv::VDimensionExpr {
    bool constant;
    int64_t value;
    Expression(bool constant_, int64_t value_) : constant(constant_), value(value_) {}
    bool isConstant() const override { return constant; }
    int64_t getConstantValue() const override { return constant ? value : INT64_MIN; }
    bool isSizeTensor() const override { return false; }
};
struct Dimension : IDimensionExpr {
    explicit Dimension(Expression* expression) { mImpl = expression; }
};
struct NoBuilder : IExprBuilder {};

// Output sizes, where those of `call` may be looked at as constants or (dynamic) only be passed on.
std::vector<Dims> output_shapes(IPluginV3OneBuildV2& build, const Call& call, bool dynamic) {
    std::vector<std::unique_ptr<Expression>> expressions;
    std::vector<std::unique_ptr<Dimension>> dimensions;
    std::vector<DimsExprs> in(call.size()), out(build.getNbOutputs());
    for (size_t i = 0; i < call.size(); i++) {
        in[i].nbDims = call[i].dims.nbDims;
        for (int32_t axis = 0; axis < in[i].nbDims; axis++) {
            expressions.push_back(std::make_unique<Expression>(!dynamic, call[i].dims.d[axis]));
            dimensions.push_back(std::make_unique<Dimension>(expressions.back().get()));
            in[i].d[axis] = dimensions.back().get();
        }
    }
    NoBuilder builder;
    if (build.getOutputShapes(in.data(), static_cast<int32_t>(in.size()), nullptr, 0, out.data(),
                              static_cast<int32_t>(out.size()), builder) != 0) {
        refused("getOutputShapes");
    }
    std::vector<Dims> shapes(out.size());
    for (size_t i = 0; i < out.size(); i++) {
        shapes[i].nbDims = out[i].nbDims;
        for (int32_t axis = 0; axis < out[i].nbDims; axis++) {
            for (size_t n = 0; n < dimensions.size(); n++) {
                if (dimensions[n].get() == out[i].d[axis]) shapes[i].d[axis] = expressions[n]->value;
            }
        }
    }
    return shapes;
}

struct Node {
    IPluginV3* plugin;
    IPluginV3OneBuildV2& build() const {
        return *static_cast<IPluginV3OneBuildV2*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
    }
    IPluginV3OneRuntime& runtime() const {
        return *static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    }
    std::string metadata() const { return build().getMetadataString(); }
};

std::vector<DataType> output_types(const Node& node, const Call& call) {
    std::vector<DataType> in, out(node.build().getNbOutputs());
    for (const Tensor& tensor : call) in.push_back(tensor.type);
    if (node.build().getOutputDataTypes(out.data(), static_cast<int32_t>(out.size()), in.data(),
                                        static_cast<int32_t>(in.size())) != 0) {
        refused("getOutputDataTypes");
    }
    return out;
}

std::vector<PluginTensorDesc> describe(const Call& call) {
    std::vector<PluginTensorDesc> made;
    for (const Tensor& tensor : call) made.push_back({tensor.dims, tensor.type, TensorFormat::kLINEAR, 1.0F});
    return made;
}

// Formats, configuration and workspace for shapes up to the largest of the calls, as a builder goes about it.
size_t build_phase(const Node& node, const Case& given) {
    const Call& first = given.calls.front();
    const std::vector<DataType> types = output_types(node, first);
    std::vector<DynamicPluginTensorDesc> all;
    for (size_t i = 0; i < first.size(); i++) {
        DynamicPluginTensorDesc desc{{first[i].dims, first[i].type, TensorFormat::kLINEAR, 1.0F}, {}, {}, {}};
        desc.min = desc.opt = desc.max = first[i].dims;
        for (const Call& call : given.calls) {
            for (int32_t axis = 0; axis < first[i].dims.nbDims; axis++) {
                const int64_t size = call[i].dims.d[axis];
                if (size != desc.desc.dims.d[axis]) desc.desc.dims.d[axis] = -1;
                desc.min.d[axis] = std::min(desc.min.d[axis], size);
                desc.max.d[axis] = std::max(desc.max.d[axis], size);
            }
        }
        all.push_back(desc);
    }
    const int32_t ins = static_cast<int32_t>(all.size()), outs = static_cast<int32_t>(types.size());
    const std::vector<Dims> shapes = output_shapes(node.build(), first, false);
    for (int32_t i = 0; i < outs; i++) {
        all.push_back({{shapes[i], types[i], TensorFormat::kLINEAR, 1.0F}, shapes[i], shapes[i], shapes[i]});
    }
    for (int32_t i = 0; i < ins + outs; i++) {
        if (!node.build().supportsFormatCombination(i, all.data(), ins, outs)) die("a linear format is refused");
        all[i].desc.format = TensorFormat::kCHW4;
        if (node.build().supportsFormatCombination(i, all.data(), ins, outs)) die("a vectorised format is taken");
        all[i].desc.format = TensorFormat::kLINEAR;
    }
    if (node.build().configurePlugin(all.data(), ins, all.data() + ins, outs) != 0) refused("configurePlugin");
    return node.build().getWorkspaceSize(all.data(), ins, all.data() + ins, outs);
}

std::vector<std::vector<char>> enqueue(const Node& node, const Call& call, const std::vector<Dims>& shapes,
                                       size_t workspace_bytes, bool aliased, bool captured) {
    const std::vector<DataType> types = output_types(node, call);
    const std::vector<PluginTensorDesc> in_desc = describe(call);
    std::vector<PluginTensorDesc> out_desc;
    std::vector<std::unique_ptr<Buffer>> in_buffers, out_buffers;
    std::vector<const void*> in;
    std::vector<void*> out;
    std::vector<bool> overwritten(call.size(), false);
    for (const Tensor& tensor : call) {
        in_buffers.push_back(std::make_unique<Buffer>(tensor.bytes.size()));
        in_buffers.back()->write(tensor.bytes);
        in.push_back(in_buffers.back()->data());
    }
    for (size_t i = 0; i < types.size(); i++) {
        out_desc.push_back({shapes[i], types[i], TensorFormat::kLINEAR, 1.0F});
        const int32_t input = aliased ? node.build().getAliasedInput(static_cast<int32_t>(i)) : -1;
        out_buffers.push_back(std::make_unique<Buffer>(input < 0 ? bytes_of(types[i], shapes[i]) : 0));
        if (input < 0) {
            out_buffers.back()->fill(0xFF);
            out.push_back(out_buffers.back()->data());
        } else {
            overwritten[input] = true;
            out.push_back(in_buffers[input]->data());
        }
    }
    Buffer workspace(workspace_bytes);
    workspace.fill(0xFF);
    runner::Stream stream;
    const auto body = [&](cudaStream_t on) {
        return node.runtime().enqueue(in_desc.data(), out_desc.data(), in.data(), out.data(), workspace.data(), on);
    };
    if (stream.run(body, captured) != 0) refused("enqueue");

    std::vector<std::vector<char>> results;
    for (size_t i = 0; i < types.size(); i++) {
        const int32_t input = aliased ? node.build().getAliasedInput(static_cast<int32_t>(i)) : -1;
        results.push_back(input < 0 ? out_buffers[i]->read() : in_buffers[input]->read());
    }
    for (size_t i = 0; i < call.size(); i++) {
        if (!overwritten[i] && in_buffers[i]->read() != call[i].bytes) die("enqueue changed an input");
    }
    return results;
}

void write(DataType type, const Dims& dims, const std::vector<char>& bytes) {
    std::cout << "out " << type_of(type).name;
    for (int32_t i = 0; i < dims.nbDims; i++) std::cout << ' ' << dims.d[i];
    std::cout << '\n';
    std::cout.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    std::cout << '\n';
}

void* load(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return library == nullptr ? die("dlopen: ", dlerror()), nullptr : library;
}

IPluginCreatorV3One* find_creator(const char* path, const std::string& name) {
    const auto creators = dspark::symbol<IPluginCreatorInterface* const*(int32_t&)>(load(path), "getCreators");
    if (creators == nullptr) die("the library has no getCreators");
    int32_t count = 0;
    IPluginCreatorInterface* const* all = creators(count);
    for (int32_t i = 0; i < count; i++) {
        auto* creator = static_cast<IPluginCreatorV3One*>(all[i]);
        if (name == creator->getPluginName()) return creator;
    }
    die("the library has no creator of ", name.c_str());
}

IPluginCreatorV3One* find_registered(const char* path, const std::string& name, const char* tensorrt) {
    void* library = load(tensorrt);
    if (!dspark::speaks_11(library)) die("too old: ", tensorrt);
    dspark::Registry* registry = dspark::symbol<dspark::Registry*()>(library, "getPluginRegistry")();
    if (registry->loadLibrary(path) == nullptr) die("the registry does not load ", path);
    IPluginCreatorInterface* creator = registry->getCreator(name.c_str(), "1", "dspark");
    if (creator == nullptr) die("the registry has no creator of ", name.c_str());
    return static_cast<IPluginCreatorV3One*>(creator);
}

}  // namespace

int main(int argc, char** argv) {
    const char* usage = "usage: runner LIBRARY [--separate] [--registry TENSORRT] < case > results";
    if (argc < 2) die(usage);
    bool aliased = true;
    const char* tensorrt = nullptr;
    for (int i = 2; i < argc; i++) {
        const std::string option = argv[i];
        if (option == "--separate") {
            aliased = false;
        } else if (option == "--registry" && i + 1 < argc) {
            tensorrt = argv[++i];
        } else {
            die(usage);
        }
    }
    const std::unique_ptr<Case> given = read_case(std::cin);
    IPluginCreatorV3One* creator =
        tensorrt == nullptr ? find_creator(argv[1], given->plugin) : find_registered(argv[1], given->plugin, tensorrt);

    const PluginFieldCollection fields{static_cast<int32_t>(given->fields.size()), given->fields.data()};
    const std::unique_ptr<IPluginV3> created(creator->createPlugin("node", &fields, TensorRTPhase::kBUILD));
    if (created == nullptr) refused("createPlugin");
    const std::unique_ptr<IPluginV3> cloned(created->clone());
    if (Node{cloned.get()}.metadata() != Node{created.get()}.metadata()) die("a clone differs");
    const size_t workspace_bytes = given->calls.empty() ? 0 : build_phase(Node{cloned.get()}, *given);

    // As an engine file is read: from the serialised fields alone, and with one object for each execution context.
    const std::unique_ptr<IPluginV3> loaded(
        creator->createPlugin("node", Node{cloned.get()}.runtime().getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
    if (loaded == nullptr) die("the serialised fields are refused");
    if (Node{loaded.get()}.metadata() != Node{created.get()}.metadata()) die("the serialised plugin differs");
    const std::unique_ptr<IPluginV3> attached(Node{loaded.get()}.runtime().attachToContext(nullptr));
    const Node node{attached.get()};

    for (const Call& call : given->calls) {
        const std::vector<Dims> shapes = output_shapes(node.build(), call, true);
        const std::vector<PluginTensorDesc> in = describe(call);
        const std::vector<DataType> types = output_types(node, call);
        std::vector<PluginTensorDesc> out;
        for (size_t i = 0; i < types.size(); i++) out.push_back({shapes[i], types[i], TensorFormat::kLINEAR, 1.0F});
        if (node.runtime().onShapeChange(in.data(), static_cast<int32_t>(in.size()), out.data(),
                                         static_cast<int32_t>(out.size())) != 0) {
            refused("onShapeChange");
        }
        const auto results = enqueue(node, call, shapes, workspace_bytes, aliased, false);
        if (enqueue(node, call, shapes, workspace_bytes, aliased, runner::Stream::can_capture) != results) {
            die("two runs differ");
        }
        for (size_t i = 0; i < results.size(); i++) write(types[i], shapes[i], results[i]);
    }
    return 0;
}
