// The inputs and outputs of an op by name, what they have to be, and which of them a node has.
//
// TensorRT knows no optional inputs: a node lists those that are there, and its attribute `inputs` names them in order
// ("q,k,v,..."). Outputs likewise.
#pragma once

#include <NvInferRuntime.h>

#include <array>
#include <string>
#include <vector>

#include "dspark/dtype.h"

namespace dspark {

class FieldReader;

enum class Element { weight, fp32, int32, int64 };  // weight: fp32, fp16 or bf16, the same in all tensors of a node

// One size of a tensor: the size of that name, or so much more. Equal names are equal sizes in all tensors of a node.
struct Size {
    const char* name;
    int64_t plus;
    constexpr Size(const char* name_, int64_t plus_ = 0) : name(name_), plus(plus_) {}
};

struct Tensor {
    const char* name;
    Element element;
    std::vector<Size> shape;
    bool required;
};

constexpr int MAX_TENSORS = 16, MAX_SIZES = 16;

// The tensors on one side of a node. `table` holds all that the op knows there, in the order of its enumeration.
class TensorList {
  public:
    // Reports a name that the table does not have, that comes twice, or that is required and not there.
    TensorList(FieldReader& fields, const char* field, const std::vector<Tensor>& table, const std::string& names);

    int count() const { return count_; }
    bool has(int which) const { return position_[which] >= 0; }
    int position(int which) const { return position_[which]; }  // among the tensors of the node; -1: not there
    const Tensor& at(int position) const { return (*table_)[which_[position]]; }

  private:
    const std::vector<Tensor>* table_;
    int count_ = 0;
    std::array<int8_t, MAX_TENSORS> position_{}, which_{};
};

// The sizes of a node's tensors by their names in the table. A size of -1 is not known yet and fits everything.
// Allocates nothing: a shape changes at every step of a decoder.
class Sizes {
  public:
    explicit Sizes(const char* plugin) : plugin_(plugin) {}
    // Takes in one tensor; false and a message where its rank, or a size that is known already, differs.
    bool add(const Tensor& tensor, int32_t rank, const int64_t* sizes);
    int64_t operator[](const char* name) const;  // -1: not known

  private:
    struct Known {
        const char* name;
        int64_t size;
        const char* tensor;  // that gave it
    };
    const Known* find(const char* name) const;

    const char* plugin_;
    int count_ = 0;
    std::array<Known, MAX_SIZES> known_;
};

const char* name_of(nvinfer1::DataType type);
const char* name_of(Element element);

// Whether `type` is what an element may be, where `weight` is the type of the node's weights.
bool fits(Element element, nvinfer1::DataType type, nvinfer1::DataType weight);

// Only for types that fits() lets through as weights.
DType dtype_of(nvinfer1::DataType type);

}  // namespace dspark
