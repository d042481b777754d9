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
