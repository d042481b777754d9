//! Query rows and keys that the selection kernels are tested on: a sink token, equal scores, one token, rows in the
//! middle of a context, groups of query heads, layouts of both kinds.

use kvpack::AttentionShape;
use kvpack::backend::Backend;
use kvpack::cpu::{DenseRows, StatsInput};
use kvpack::plan::{Elements, RowLayout, Scoring, TokenRange};
use kvpack::policy::{HeadAggregation, QueryPositions, ScoreRequest, ScoreRule, Spans, TextRule, Weighing, text_prior};
use pollster::block_on;

/// Queries `[rows, query_heads, head_dim]` and keys of one layer.
pub struct Case {
    pub name: String,
    pub shape: AttentionShape,
    pub scale: f32,
    pub rows: QueryPositions,
    pub queries: Vec<f32>,
    pub query_layout: RowLayout,
    pub keys: Vec<f32>,
    pub key_layout: RowLayout,
}

impl Case {
    pub fn input(&self) -> StatsInput<'_> {
        let queries = DenseRows { elements: Elements::F32(&self.queries), layout: self.query_layout };
        StatsInput { shape: self.shape, scale: self.scale, rows: &self.rows, queries, keys: self.keys() }
    }

    pub fn keys(&self) -> DenseRows<'_> {
        DenseRows { elements: Elements::F32(&self.keys), layout: self.key_layout }
    }

    pub fn query(&self, row: usize, head: usize) -> &[f32] {
        &self.queries[self.query_layout.row(row, head)..][..self.shape.head_dim()]
    }

    pub fn key(&self, token: usize, head: usize) -> &[f32] {
        &self.keys[self.key_layout.row(token, head)..][..self.shape.head_dim()]
    }
}

/// Numbers of about unit variance that f16 holds exactly, so that both element types measure the same.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count).map(|_| (0..4).map(|_| random.i32(-64..=64) as f32 / 64.0).sum()).collect()
}

/// Group sizes, head dimensions, numbers of tokens and rows in turn.
pub fn cases() -> Vec<Case> {
    let sizes = [(1, 1, 64), (8, 2, 64), (3, 1, 80), (4, 1, 96), (14, 2, 128), (2, 2, 256)];
    let contexts = [(1, 1), (300, 50), (130, 130), (513, 9), (128, 1), (257, 17)];
    let mut cases = Vec::new();
    for (i, ((query_heads, kv_heads, head_dim), (tokens, rows))) in sizes.into_iter().zip(contexts).enumerate() {
        let shape = AttentionShape::new(query_heads, kv_heads, head_dim).unwrap();
        let query_shape = AttentionShape::new(query_heads, query_heads, head_dim).unwrap();
        let rows = match i % 3 {
            // Some rows of the middle and the last.
            2 => {
                let picked = (0..tokens as u32).filter(|position| position % 3 == 1).take(rows - 1);
                let last = std::iter::once(tokens as u32 - 1);
                QueryPositions::new(
                    picked.filter(|&position| position + 1 < tokens as u32).chain(last).collect(),
                    tokens,
                )
            }
            _ => QueryPositions::last(rows, tokens),
        };
        let rows = rows.unwrap();
        let (query_layout, key_layout) = match i % 2 {
            0 => (RowLayout::token_major(rows.len(), &query_shape), RowLayout::token_major(tokens, &shape)),
            _ => (RowLayout::head_major(rows.len(), &query_shape), RowLayout::head_major(tokens, &shape)),
        };
        let mut queries = numbers(query_layout.elements_needed(&query_shape), 7 + i as u64);
        let mut keys = numbers(key_layout.elements_needed(&shape), 70 + i as u64);
        // The sink: a token whose score with every query is 14 above the rest. Its channel is 2 in all queries.
        queries.chunks_exact_mut(head_dim).for_each(|query| query[0] = 2.0);
        for head in 0..kv_heads {
            keys[key_layout.row(0, head)] = (7.0 * (head_dim as f32).sqrt()).floor();
        }
        let name = format!("{query_heads}/{kv_heads} heads of {head_dim}, {} rows, {tokens} keys", rows.len());
        let scale = Scoring::of(&shape).scale() * [1.0, 0.75][i / 2 % 2];
        cases.push(Case { name, shape, scale, rows, queries, query_layout, keys, key_layout });
    }
    // All scores equal.
    let shape = AttentionShape::new(2, 1, 64).unwrap();
    let query_shape = AttentionShape::new(2, 2, 64).unwrap();
    cases.push(Case {
        name: "equal scores".into(),
        shape,
        scale: 0.125,
        rows: QueryPositions::last(20, 200).unwrap(),
        queries: vec![0.5; 20 * 2 * 64],
        query_layout: RowLayout::token_major(20, &query_shape),
        keys: vec![0.25; 200 * 64],
        key_layout: RowLayout::token_major(200, &shape),
    });
    cases
}

/// Every third token of every head, another third of each.
pub fn every_third(tokens: usize, heads: usize) -> Vec<u32> {
    let count = (tokens / 3).max(1);
    (0..heads)
        .flat_map(|head| (0..count as u32).map(move |i| (3 * i + head as u32 % 3).min(tokens as u32 - 1)))
        .collect()
}

/// Text goes before images by exact scores, however large the largest of them is: on the host and on a backend.
///
/// # Panics
/// When another token stays.
pub fn check_text_first<B: Backend>(backend: &B) {
    // Scores, the tokens of an image, recent tokens, the number of others that stay, and what stays.
    let large = [16384.0, 4e-4, 0.0, 2e-4, 4e-4, 1.0];
    let cases: [(&[f32], _, _, _, &[u32]); 6] = [
        (&large[..3], Some((0, 1)), 1, 1, &[1, 2]),
        // The order of text, which is that without images.
        (&large, Some((0, 1)), 1, 2, &[1, 4, 5]),
        (&large, None, 1, 3, &[0, 1, 4, 5]),
        // All text, and the best of the images.
        (&[f32::MAX, 3e38, 0.0, 0.5, 0.0, 0.0], Some((0, 2)), 0, 5, &[0, 2, 3, 4, 5]),
        (&[0.0, 1e-40, 2.0, 0.0, 4.0], Some((0, 3)), 1, 2, &[2, 3, 4]),
        // Text of score 0 ties with images of the largest, and the earlier stay (LOOK-M eq. 5).
        (&[1.0, 1.0, 0.0, 1.0, 1.0], Some((0, 2)), 1, 3, &[0, 1, 3, 4]),
    ];
    for (scores, image, recent, best, stays) in cases {
        let images: Vec<TokenRange> =
            image.into_iter().map(|(start, end)| TokenRange::new(start, end).unwrap()).collect();
        let spans = Spans::new(scores.len(), &images).unwrap();
        assert_eq!(text_prior(scores, &spans, TextRule::Raised, recent, best).unwrap(), stays, "{scores:?}");
        let rows = QueryPositions::last(1, scores.len()).unwrap();
        let rule = ScoreRule { aggregation: HeadAggregation::Mean, weighing: Weighing::Sum, pooling: None };
        let request =
            ScoreRequest { rows: &rows, spans: &spans, scores: rule, group: 1, text: TextRule::Raised, recent };
        let sums = block_on(backend.upload(scores.into())).unwrap();
        let scored = backend.token_scores(&sums, 1, &request).unwrap();
        let chosen = backend.top_k(&scored.scores, 1, recent + best).unwrap();
        assert_eq!(block_on(backend.download_indices(&chosen)).unwrap(), stays, "{scores:?} on the backend");
    }
}
