// merge_pair: merges the attention states of the same queries over two sets of tokens.
//
//   lse = M + ln(exp(a − M) + exp(b − M)),   out = (exp(a − M) x + exp(b − M) y) / (exp(a − M) + exp(b − M)),   M = max(a, b)
//
// of the states (a, x) and (b, y). A part with a log-sum-exp of −∞ is empty. If both parts are empty, the output is 0.
//
// A block owns a row of a query head, and a thread owns every (threads)-th channel of it. Both states are read once.
//
// In bounds: the grid has as many blocks as rows, and all arrays were checked to hold them.

#include "common/ptx.cuh"

struct MergeCall {
    const float* first_outputs;
    const float* first_lse;
    const float* second_outputs;
    const float* second_lse;
    float* outputs;
    float* lse;
    u32 head_dim;
    u32 unused;
};

extern "C" __global__ void merge_pair(const MergeCall call) {
    const float infinity = __int_as_float(0x7f800000);
    const float a = call.first_lse[blockIdx.x];
    const float b = call.second_lse[blockIdx.x];
    // NaN counts as larger than any number, so that it is not lost.
    const float largest = a != a || b != b ? a + b : fmaxf(a, b);
    const bool empty = largest == -infinity;
    const float first = empty || a == -infinity ? 0.0f : expf(a - largest);
    const float second = empty || b == -infinity ? 0.0f : expf(b - largest);
    const float sum = first + second;
    for (u32 channel = threadIdx.x; channel < call.head_dim; channel += blockDim.x) {
        const u64 at = (u64)blockIdx.x * call.head_dim + channel;
        // An output with weight 0 may hold anything.
        const float x = first == 0.0f ? 0.0f : first * call.first_outputs[at];
        const float y = second == 0.0f ? 0.0f : second * call.second_outputs[at];
        call.outputs[at] = empty ? 0.0f : (x + y) / sum;
    }
    if (threadIdx.x == 0) call.lse[blockIdx.x] = empty ? -infinity : largest + logf(sum);
}
