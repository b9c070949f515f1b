// MarkovArgmax: the drafter's chain of dependent argmaxes, as plugins/README.md writes it down.
//
// Floor, for Qwen3-4B (V = Vd = 151936, H = 2560, r = 256, G = 7, bf16) and R = 1; more in plugins/README.md:
//   bytes        W2, 77.8 MB, once a step: a token depends on the one before, and W2 is larger than a level 2 cache.
//                In 7 steps 544.5 MB; base logits 2.1 MB; logits 4.3 MB if wanted; noise 4.3 MB if drawn; gated head
//                1.3 MB + 0.1 MB a step, rnn head 3.9 MB + 0.8 MB a step.
//   operations   2 Vd r = 78 MFLOP a step and request: R a byte of W2. Matrix units do 150 to 300 a byte, so W2's bytes
//                decide up to some 50 requests, even where a gated or rnn e is multiplied in 3 parts (PARTS).
// So 0.16 ms at 3.35 TB/s for the 7 steps, and 7 (vanilla) or 14 dependent launches. What is done for it: 16-byte loads
// that use whole sectors, 8 of them under way in each lane; no barrier before the sums are there; W2 read once for 16
// requests, and the blocks of further ones beside it; the vanilla head inside of the vocabulary launch; an argmax that
// is one atomic maximum a block and request.
//
// The launches, in stream order (markov_argmax below):
//   begin        clears the maxima; gated, rnn: the parts of the head that depend on h_k only, of all R * G rows
//   head step    gated, rnn: e_k from W1[prev] and the state
//   vocabulary   U_k + W2 e_k, its best index
//   finish       tokens and confidences of all positions
// A token is known to the next launch as the maximum that the vocabulary launch left. Head none has no dependent steps:
// all positions are one vocabulary launch.
#pragma once

#include "dspark/markov_kernels.cuh"
#include "dspark/workspace.h"

namespace dspark {

namespace markov {

// Where things lie in the workspace, in bytes.
struct Layout {
    size_t best, projected, state, e, bytes;
};

inline Layout layout(const MarkovArgmax& p) {
    const size_t rows = static_cast<size_t>(p.requests) * p.gamma, units = static_cast<size_t>(p.requests) * p.rank;
    WorkspacePlan plan;
    const bool stateful = p.head == MarkovHead::rnn, projects = head_outputs(p.head) > 0;
    Layout made{};
    made.best = plan.place(rows * sizeof(uint64_t));
    made.projected = plan.place(rows * head_outputs(p.head) * p.rank * sizeof(float));
    made.state = plan.place(stateful ? 2 * units * sizeof(float) : 0);
    made.e = plan.place(projects ? units * 3 * 2 : 0);  // 3 parts of 2 bytes are the most
    made.bytes = plan.bytes;
    return made;
}

// All launches. Project and Dot: the products of begin and of the vocabulary.
template <typename Project, typename Dot>
Status launch_all(const MarkovArgmax& p, const Work& work, Stream stream) {
    using T = typename Dot::Weight;
    const int64_t rows = static_cast<int64_t>(p.requests) * p.gamma;
    const int outputs = head_outputs(p.head) * p.rank;
    const int steps = p.head == MarkovHead::none ? p.gamma : 1;  // that one launch can do
    const auto grid = [](int64_t x, int64_t y, int64_t z) {
        return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
    };
    // Blocks that read the same rows of a matrix are neighbours, so that those come from memory once.
    const dim3 begin_grid =
        grid(ceil_div(rows, outputs ? 8 * Project::TILES : THREADS), outputs ? ceil_div(outputs, ROWS) : 1, 1);
    const dim3 head_grid = grid(ceil_div(p.requests, HEAD_REQUESTS), ceil_div(p.rank, WARPS), 1);
    const dim3 vocabulary_grid =
        grid(ceil_div(p.requests, 8 * Dot::TILES), ceil_div(p.draft_vocab, ROWS * WARPS), steps);
    if (begin_grid.y > MAX_GRID || head_grid.y > MAX_GRID || vocabulary_grid.y > MAX_GRID || steps > MAX_GRID) {
        return Status::bad_shape;
    }
    const size_t begin_shared = outputs ? WARPS * Project::TILES * 128 * sizeof(float) : 0;
    Status status = launch(begin<Project>, begin_grid, THREADS, begin_shared, stream, p, work);
    for (int step = 0; step < p.gamma && status == Status::ok; step += steps) {
        if (outputs) {
            status =
                launch(head_step<T, typename Dot::Input, Dot::VECTOR>, head_grid, THREADS, 0, stream, p, work, step);
            if (status != Status::ok) return status;
        }
        const size_t shared = WARPS * 8 * Dot::TILES * sizeof(uint64_t);
        status = launch(vocabulary<Dot>, vocabulary_grid, THREADS, shared, stream, p, work, step);
    }
    if (status != Status::ok) return status;
    return launch(finish<T, Dot::VECTOR>, grid(ceil_div(rows, WARPS), 1, 1), THREADS, 0, stream, p, work);
}

// Whether every row of every matrix begins on a 16-byte boundary.
inline bool rows_aligned(const MarkovArgmax& p) {
    const int each = static_cast<int>(16 / size_of(p.dtype));
    return p.hidden_size % each == 0 && p.rank % each == 0 && is_aligned(p.hidden) && is_aligned(p.w1) &&
           is_aligned(p.w2) && is_aligned(p.head_weight) && is_aligned(p.confidence_weight);
}

template <typename T>
Status run(const MarkovArgmax& p, const Work& work, Stream stream) {
    if (!rows_aligned(p)) {
        using Embedding = PlainDot<T, T, 1>;
        if (head_outputs(p.head) == 0) return launch_all<Embedding, Embedding>(p, work, stream);
        return launch_all<Embedding, PlainDot<T, float, 1>>(p, work, stream);
    }
    if constexpr (std::is_same<T, float>::value) {
        return launch_all<PlainDot<T, T, 4>, PlainDot<T, T, 4>>(p, work, stream);
    } else {
        using Many = MatrixDot<T, MATRIX_TILES>;
        if (p.requests <= 8) return launch_all<Many, MatrixDot<T, 1>>(p, work, stream);
        return launch_all<Many, Many>(p, work, stream);
    }
}

inline Status check(const MarkovArgmax& p) {
    if (!is_dtype(p.dtype)) return Status::bad_dtype;
    const bool projects = head_outputs(p.head) > 0, embeds = p.head != MarkovHead::none || p.confidence_with_markov;
    if (p.head < MarkovHead::none || p.head > MarkovHead::rnn) return Status::bad_shape;
    if (p.requests < 1 || p.gamma < 1 || p.vocab < 1 || p.draft_vocab < 1 || p.hidden_size < 0)
        return Status::bad_shape;
    if (p.rank < (embeds ? 1 : 0)) return Status::bad_shape;
    if (static_cast<int64_t>(p.requests) * p.gamma > INT32_MAX || p.rank > INT32_MAX / 8) return Status::bad_shape;
    if (p.base_logits == nullptr || p.tokens == nullptr || p.confidence == nullptr) return Status::bad_pointer;
    if (p.head != MarkovHead::none && p.w2 == nullptr) return Status::bad_pointer;
    if (embeds && (p.w1 == nullptr || p.anchors == nullptr)) return Status::bad_pointer;
    if (projects && p.head_weight == nullptr) return Status::bad_pointer;
    if ((projects || p.confidence_weight != nullptr) && p.hidden == nullptr) return Status::bad_pointer;
    return Status::ok;
}

}  // namespace markov

inline size_t markov_argmax_workspace(const MarkovArgmax& p) { return markov::layout(p).bytes; }

// Enqueues the whole chain. workspace: markov_argmax_workspace(p) bytes of device memory, aligned to 16, whatever they
// hold. Any R, G, Vd and r; rows that are not a multiple of 16 bytes take the slower of the two paths.
inline Status markov_argmax(const MarkovArgmax& p, void* workspace, size_t bytes, Stream stream) {
    const Status status = markov::check(p);
    if (status != Status::ok) return status;
    const markov::Layout layout = markov::layout(p);
    if (bytes < layout.bytes) return Status::workspace_too_small;
    if (workspace == nullptr || !is_aligned(workspace)) return Status::bad_pointer;
    char* at = static_cast<char*>(workspace);
    const markov::Work work{
        reinterpret_cast<uint64_t*>(at + layout.best),
        reinterpret_cast<float*>(at + layout.projected),
        reinterpret_cast<float*>(at + layout.state),
        at + layout.e,
    };
    return with_dtype(p.dtype, [&](auto zero) { return markov::run<decltype(zero)>(p, work, stream); });
}

}  // namespace dspark
