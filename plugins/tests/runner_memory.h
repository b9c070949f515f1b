// The runner's buffers: on the device, or on the heap where the kernels run on the host shim. A buffer on the heap has
// exactly the size that was asked for, so that AddressSanitizer sees what reaches over its end.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace runner {

[[noreturn]] inline void die(const char* what, const char* why = "") {
    std::fprintf(stderr, "runner: %s%s\n", what, why);
    std::exit(1);
}

#if defined(DSPARK_DEVICE_RUNNER)

inline void expect(cudaError_t status, const char* what) {
    if (status != cudaSuccess) die(what, cudaGetErrorString(status));
}

class Buffer {
  public:
    explicit Buffer(size_t bytes) : bytes_(bytes) {
        if (bytes) expect(cudaMalloc(&data_, bytes), "cudaMalloc: ");
    }
    ~Buffer() { cudaFree(data_); }
    void fill(int byte) { expect(cudaMemset(data_, byte, bytes_), "cudaMemset: "); }
    void write(const std::vector<char>& from) {
        expect(cudaMemcpy(data_, from.data(), bytes_, cudaMemcpyHostToDevice), "cudaMemcpy: ");
    }
    std::vector<char> read() const {
        std::vector<char> to(bytes_);
        expect(cudaMemcpy(to.data(), data_, bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy: ");
        return to;
    }
    Buffer(const Buffer&) = delete;
    void* data() const { return data_; }

  private:
    void* data_ = nullptr;
    size_t bytes_;
};

class Stream {
  public:
    Stream() { expect(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate: "); }
    ~Stream() { cudaStreamDestroy(stream_); }
    cudaStream_t get() const { return stream_; }

    // Runs what `enqueue` puts into the stream. With `captured`, through a CUDA graph: capturing fails where enqueue
    // allocates, synchronises or touches another stream.
    template <typename Enqueue>
    int32_t run(Enqueue enqueue, bool captured) {
        expect(cudaDeviceSynchronize(), "before enqueue: ");
        if (captured) expect(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture: ");
        const int32_t status = enqueue(stream_);
        if (captured) {
            cudaGraph_t graph;
            cudaGraphExec_t executable;
            expect(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture: ");
            expect(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate: ");
            expect(cudaGraphLaunch(executable, stream_), "cudaGraphLaunch: ");
            expect(cudaStreamSynchronize(stream_), "the graph: ");
            cudaGraphExecDestroy(executable);
            cudaGraphDestroy(graph);
        }
        expect(cudaStreamSynchronize(stream_), "enqueue: ");
        return status;
    }
    static constexpr bool can_capture = true;

  private:
    cudaStream_t stream_;
};

#else

class Buffer {
  public:
    explicit Buffer(size_t bytes) : bytes_(bytes) {
        if (bytes && posix_memalign(&data_, 16, bytes) != 0) die("out of memory");
    }
    ~Buffer() { std::free(data_); }
    void fill(int byte) {
        if (bytes_) std::memset(data_, byte, bytes_);
    }
    void write(const std::vector<char>& from) {
        if (bytes_) std::memcpy(data_, from.data(), bytes_);
    }
    std::vector<char> read() const {
        const char* from = static_cast<const char*>(data_);
        return std::vector<char>(from, from + bytes_);
    }
    Buffer(const Buffer&) = delete;
    void* data() const { return data_; }

  private:
    void* data_ = nullptr;
    size_t bytes_;
};

class Stream {
  public:
    template <typename Enqueue>
    int32_t run(Enqueue enqueue, bool) {
        return enqueue(nullptr);
    }
    static constexpr bool can_capture = false;
};

#endif

}  // namespace runner
