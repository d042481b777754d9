// A tile of rows that stays in registers while others stream through. An invocation owns one resident row. Passing rows
// are staged in workgroup memory, STAGED at a time, and all invocations read them at once.
//
// Both kinds of rows are read from memory coalesced. The product of a resident and a passing row costs HEAD_DIM fused
// multiply-adds and HEAD_DIM / 4 broadcast loads from workgroup memory. It needs no reduction across invocations.
//
// gives: VECTORS, RESIDENT, STAGED, STAGED_VECTORS, staged, resident, take_resident, product
// set by plans: HEAD_DIM

const HEAD_DIM: u32 = 128u;
const VECTORS: u32 = HEAD_DIM / 4u;
// Resident rows of a tile: the invocations of a workgroup.
const RESIDENT: u32 = 128u;
const STAGED: u32 = 8u;
const STAGED_VECTORS: u32 = STAGED * VECTORS;

var<workgroup> staged: array<vec4<f32>, STAGED_VECTORS>;
var<private> resident: array<vec4<f32>, VECTORS>;

// Takes the invocation's resident row from the staged rows. `first` is the place of the first staged row in the tile.
fn take_resident(first: u32, invocation: u32) {
    if (invocation / STAGED == first / STAGED) {
        let at = (invocation % STAGED) * VECTORS;
        // unroll
        for (var c = 0u; c < VECTORS; c++) {
            resident[c] = staged[at + c];
        }
    }
}

// The product of the resident row with staged row `r`, in four independent sums of every fourth channel.
//
// The caller's loop over staged rows is not unrolled. With the channels written out, one row is enough work to hide the
// latency of a sum, and eight rows at once made kernels that software drivers compile for minutes.
fn product(r: u32) -> f32 {
    var sums = vec4<f32>();
    // unroll
    for (var c = 0u; c < VECTORS; c++) {
        sums += resident[c] * staged[r * VECTORS + c];
    }
    return (sums.x + sums.y) + (sums.z + sums.w);
}
