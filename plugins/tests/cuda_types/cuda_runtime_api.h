// All that TensorRT's headers want of CUDA, for builds on the host shim: those have their own dim3 and no CUDA.
#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
