// The entry points of host_api.h on a GPU, with memory there for callers that have no CUDA of their own:
// nvcc -shared (tools/gpu_check.sh builds it).
#include "host_accept.cpp"
#include "host_api.cpp"
#include "host_attention.cpp"
#include "host_markov.cpp"

namespace {

const char* text(cudaError_t status) { return status == cudaSuccess ? nullptr : cudaGetErrorString(status); }

}  // namespace

// Both return what went wrong, or null. What a kernel does wrong is heard of here too.

// *to: new device memory of exactly that size (compute-sanitizer sees what reaches over its end), a copy of `from`.
DSPARK_HOST_API const char* dspark_device_upload(void** to, const void* from, size_t bytes) {
    const cudaError_t status = cudaMalloc(to, bytes ? bytes : 1);
    return text(status != cudaSuccess ? status : cudaMemcpy(*to, from, bytes, cudaMemcpyHostToDevice));
}

// Waits for all kernels, copies, and frees what dspark_device_upload made.
DSPARK_HOST_API const char* dspark_device_download(void* to, void* from, size_t bytes) {
    cudaError_t status = cudaDeviceSynchronize();
    if (status == cudaSuccess) status = cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost);
    const cudaError_t freed = cudaFree(from);
    return text(status != cudaSuccess ? status : freed);
}
