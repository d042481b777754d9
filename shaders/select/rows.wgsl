// Rows of dense tensors that kernels move and compare.

// -------- move_rows --------

// Copies of rows, bit for bit: arguments, and the words of a row.
//
// gives: call, indices, moved, ROW_WORDS, row_word
// binds: 0 call, 1 rows, 2 indices, 3 moved
// set by plans: HEAD_DIM, PER_WORD

struct MoveCall {
    // Index of the first element of the rows within their binding.
    first_element: u32,
    token_stride: u32,
    head_stride: u32,
    tokens: u32,
    kv_heads: u32,
    // Rows of the result, of each head.
    count: u32,
    chunk_tokens: u32,
    chunks: u32,
}

@group(0) @binding(0) var<storage, read> call: MoveCall;
@group(0) @binding(1) var<storage, read> rows: array<u32>;
@group(0) @binding(2) var<storage, read> indices: array<u32>;
// [kv_head][count][HEAD_DIM].
@group(0) @binding(3) var<storage, read_write> moved: array<u32>;

const HEAD_DIM: u32 = 128u;
// 1 for 32-bit elements; 2 for 16-bit elements, the first of them in the low half.
const PER_WORD: u32 = 1u;
const ROW_WORDS: u32 = HEAD_DIM / PER_WORD;

// Word `word` of a token's row. The row's elements may begin in the middle of a word.
fn row_word(token: u32, kv_head: u32, word: u32) -> u32 {
    let at = call.first_element + token * call.token_stride + kv_head * call.head_stride + word * PER_WORD;
    if (PER_WORD == 1u) {
        return rows[at];
    }
    let low = rows[at / 2u] >> (16u * (at % 2u));
    let high = rows[(at + 1u) / 2u] >> (16u * ((at + 1u) % 2u));
    return (low & 0xffffu) | (high << 16u);
}

// -------- resident_rows --------

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
