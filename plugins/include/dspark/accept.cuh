// Accept: how many drafts of each request the target keeps, and the token that follows them (no ONNX op; the runtime
// calls it behind the target's forward). Written meaning, for each request, with drafts x_0 .. x_{l-1} (l <= G), target
// rows 0 .. l (row_start says how many) and p_k = softmax(row k / temperature):
//
//   temperature 0 or less   n = length of the longest prefix with x_k = argmax of row k; next = argmax of row n.
//   temperature above 0     n = first k with not u_k * q_k(x_k) < p_k(x_k), that is u_k >= p / q; l if there is none.
//                           next is drawn by inverse CDF, tokens in order, with one more uniform: at n < l from
//                           max(p_n - q_n, 0), from p_n if the sum of that is 0; at n = l from p_l.
//   q_k                     softmax(draft row k / draft temperature) where the draft was drawn so, else all at x_k.
//
// Argmax: the lowest index among equals. NaN counts as -inf. A row that is all -inf has argmax 0 and p = 0. Never
// drawn: a token of weight 0. A request without rows accepts 0 and has next = -1.
//
// Floor, for Qwen3-4B (V = Vd = 151936, G = 7, bf16 target logits) and R = 1:
//   bytes        greedy: 8 target rows once, 2.4 MB. Drawn: 7 fp32 draft rows too, once, 4.3 MB, and the row where it
//                ends again, of both, 0.9 MB: its weights need sums that are known at its end only. 7.6 MB in all.
//   operations   an exponential an element: 2.3 million.
// So 0.7 us (greedy) and 2.3 us (drawn) at 3.35 TB/s: less than what the 2 or 4 dependent launches cost. Each of those
// that read rows spreads them over all of the GPU in chunks. With hundreds of rows the bytes decide.
//
// The launches, in stream order (accept below):
//   rows     of each chunk of each row: best index, sum of exponentials; for draft rows the drafted token's logit
//   decide   the chunks put together; n; greedy requests are done
//   masses   others: of each chunk of the row where it ended, the sum of the weights to draw from
//   draw     the chunk, then the token
#pragma once

#include "dspark/accept_kernels.cuh"
#include "dspark/workspace.h"

namespace dspark {

namespace acceptance {

struct Layout {
    size_t best, sum, drafted, masses, endings, bytes;
    int chunks;
};

inline Layout layout(const Accept& p) {
    WorkspacePlan plan;
    Layout made{};
    const int longest = p.draft_logits != nullptr && p.draft_vocab > p.vocab ? p.draft_vocab : p.vocab;
    made.chunks = (longest - 1) / CHUNK + 1;
    const size_t entries = static_cast<size_t>(p.requests) * 2 * (p.gamma + 1) * made.chunks;
    made.best = plan.place(entries * sizeof(uint64_t));
    made.sum = plan.place(entries * sizeof(float));
    made.drafted = plan.place(entries * sizeof(float));
    made.masses = plan.place(static_cast<size_t>(p.requests) * 2 * made.chunks * sizeof(float));
    made.endings = plan.place(p.requests * sizeof(Ending));
    made.bytes = plan.bytes;
    return made;
}

inline Status check(const Accept& p) {
    if (!is_dtype(p.dtype)) return Status::bad_dtype;
    if (p.rows < 0 || p.requests < 1 || p.gamma < 0 || p.vocab < 1) return Status::bad_shape;
    if (p.draft_logits != nullptr && p.draft_vocab < 1) return Status::bad_shape;
    if (static_cast<int64_t>(p.requests) * 2 * (p.gamma + 1) > INT32_MAX) return Status::bad_shape;
    if (p.target_logits == nullptr || p.row_start == nullptr || p.accepted == nullptr || p.next == nullptr) {
        return Status::bad_pointer;
    }
    if (p.gamma > 0 && p.drafts == nullptr) return Status::bad_pointer;
    if (p.temperature != nullptr && p.final_uniform == nullptr) return Status::bad_pointer;
    if (p.temperature != nullptr && p.gamma > 0 && p.accept_uniform == nullptr) return Status::bad_pointer;
    const size_t positions = (static_cast<size_t>(p.gamma) + 1) * sizeof(Position);
    const size_t chunks = (CHUNK + THREADS + 2 * static_cast<size_t>(layout(p).chunks)) * sizeof(float);
    if (positions > MAX_SHARED_BYTES || chunks > MAX_SHARED_BYTES || layout(p).chunks > MAX_GRID)
        return Status::bad_shape;
    return Status::ok;
}

template <typename T>
Status run(const Accept& p, const Work& work, Stream stream) {
    const unsigned requests = static_cast<unsigned>(p.requests), positions = static_cast<unsigned>(p.gamma) + 1;
    const unsigned chunks = static_cast<unsigned>(work.chunks);
    const bool drawn = p.temperature != nullptr;
    const bool soft = drawn && p.draft_logits != nullptr && p.draft_temperature != nullptr;
    const size_t row_shared = WARPS * (sizeof(uint64_t) + sizeof(float)) + sizeof(float);
    Status status =
        launch(rows<T>, dim3(requests * positions, chunks, soft ? 2 : 1), THREADS, row_shared, stream, p, work);
    if (status != Status::ok) return status;
    status = launch(decide<T>, dim3(requests), THREADS, positions * sizeof(Position), stream, p, work);
    if (status != Status::ok || !drawn) return status;

    const unsigned vocab_chunks = (static_cast<unsigned>(p.vocab) - 1) / CHUNK + 1;
    const size_t mass_shared = (CHUNK + 2 * WARPS) * sizeof(float);
    status = launch(masses<T>, dim3(requests, vocab_chunks), THREADS, mass_shared, stream, p, work);
    if (status != Status::ok) return status;
    const size_t draw_shared = (CHUNK + THREADS + 2 * vocab_chunks) * sizeof(float);
    return launch(draw<T>, dim3(requests), THREADS, draw_shared, stream, p, work);
}

}  // namespace acceptance

inline size_t accept_workspace(const Accept& p) { return acceptance::layout(p).bytes; }

// Enqueues the decision. workspace: accept_workspace(p) bytes of device memory, aligned to 16, whatever they hold.
inline Status accept(const Accept& p, void* workspace, size_t bytes, Stream stream) {
    const Status status = acceptance::check(p);
    if (status != Status::ok) return status;
    const acceptance::Layout layout = acceptance::layout(p);
    if (bytes < layout.bytes) return Status::workspace_too_small;
    if (workspace == nullptr || !is_aligned(workspace)) return Status::bad_pointer;
    char* at = static_cast<char*>(workspace);
    const acceptance::Work work{
        reinterpret_cast<uint64_t*>(at + layout.best),
        reinterpret_cast<float*>(at + layout.sum),
        reinterpret_cast<float*>(at + layout.drafted),
        reinterpret_cast<float*>(at + layout.masses),
        reinterpret_cast<acceptance::Ending*>(at + layout.endings),
        layout.chunks,
    };
    return with_dtype(p.dtype, [&](auto zero) { return acceptance::run<decltype(zero)>(p, work, stream); });
}

}  // namespace dspark
