// What the kernels with cooperative matrices have in common.

// import codes = linear/codes.wgsl#four
// import scales = linear/scales.wgsl#half
// import unit = linear/unit.wgsl#one
// import output = linear/output.wgsl#f32
// import half_octet = linear/half_octet.wgsl#half

alias Half4 = vec4<f16>;
alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sums = coop_mat16x16<f32, C>;

// Eight neighbouring weights of a chunk, each rounded once to f16.
struct HalfOctet {
    low: Half4,
    high: Half4,
}

const CHUNKS: u32 = 128u;
const GROUP_CHUNKS: u32 = 4u;
const GROUPS: u32 = CHUNKS / GROUP_CHUNKS;
const OUTPUTS: u32 = 4096u;

// Columns of a block of sums lie this many numbers apart.
const COLUMN: u32 = 20u;
