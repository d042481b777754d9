// merge_run: merges the states of query items that `attend_run` wrote into the outputs. The formula is that of
// merge_states.cu.
//
// A block owns a query (y) of the first item (x) of its query block, and a KV head (z). Blocks of other items return. A
// thread owns every (threads)-th output of the KV head's query heads.
//
// Memory: every state once. In bounds: as merge_states.cu; queries beyond those of the item return.

#include "merge_states.cu"

extern "C" __global__ void __launch_bounds__(WARPS * 32) merge_run(const AttendCall call) {
    await_earlier_kernels();
    admit_later_kernels();
    const Item item = call.items[blockIdx.x];
    if (item.tokens == 0u || item.states == 1u || item.state != item.first_state || blockIdx.y >= item.queries) return;
    merge_states(call, item, blockIdx.y, blockIdx.z * call.group, call.group);
}
