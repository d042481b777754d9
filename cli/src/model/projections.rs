//! The linear layers of a transformer block.

/// A linear layer of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    Query,
    Key,
    Value,
    AttentionOutput,
    Gate,
    Up,
    Down,
}

/// What linear layers of a block take. Some share their input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Input {
    /// The normed stream, of queries, keys and values.
    Attention,
    /// What attention returns.
    AttentionOutput,
    /// The normed stream, of gate and up.
    FeedForward,
    /// activation(gate x) · up x.
    Down,
}

impl Input {
    /// All, in the order of a forward pass.
    pub const ALL: [Self; 4] = [Self::Attention, Self::AttentionOutput, Self::FeedForward, Self::Down];

    /// The projections that take it.
    pub fn projections(self) -> &'static [Projection] {
        match self {
            Self::Attention => &[Projection::Query, Projection::Key, Projection::Value],
            Self::AttentionOutput => &[Projection::AttentionOutput],
            Self::FeedForward => &[Projection::Gate, Projection::Up],
            Self::Down => &[Projection::Down],
        }
    }

    /// The name of the norm before it in layer `layer` of a GGUF file, where there is one.
    pub fn norm_name(self, layer: usize) -> Option<String> {
        match self {
            Self::Attention => Some(format!("blk.{layer}.attn_norm.weight")),
            Self::FeedForward => Some(format!("blk.{layer}.ffn_norm.weight")),
            Self::AttentionOutput | Self::Down => None,
        }
    }
}

impl Projection {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Query, Self::Key, Self::Value, Self::AttentionOutput, Self::Gate, Self::Up, Self::Down];

    /// Its name in layer `layer` of a GGUF file.
    pub fn name(self, layer: usize) -> String {
        let part = match self {
            Self::Query => "attn_q",
            Self::Key => "attn_k",
            Self::Value => "attn_v",
            Self::AttentionOutput => "attn_output",
            Self::Gate => "ffn_gate",
            Self::Up => "ffn_up",
            Self::Down => "ffn_down",
        };
        format!("blk.{layer}.{part}")
    }
}
