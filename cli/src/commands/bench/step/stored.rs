//! What timed steps stored, against the rows that they were given.

use anyhow::{Result, ensure};
use kvpack::Backend;
use kvpack::cache::ModelCache;
use kvpack::cpu::nmse;

use super::{ALL_STEPS, KEYS, VALUES};
use crate::commands::bench::timed::random_rows;
use crate::outcome::Wrong;

/// The newest tokens, which windows leave in f16: 4 bits are within a hundredth, and tokens that nobody stored at 1.
const NEWEST: (usize, f64) = (64, 0.05);

/// Those before, of which windows are packed at 2 bits, some together with tokens of the prompt.
const OLDER: (usize, f64) = (ALL_STEPS, 0.6);

/// Checks the tokens of the steps in the first and the last sequence of a layer. Every step stores the same row.
///
/// # Errors
/// When the backend fails; [`Wrong`].
pub async fn check<B: Backend>(backend: &B, cache: &ModelCache<B>, layer: usize, sequences: usize) -> Result<()> {
    let shape = *cache.shape(layer)?;
    let (dim, row) = (shape.head_dim(), shape.kv_heads() * shape.head_dim());
    let given = [KEYS, VALUES].map(|seed| random_rows(sequences * row, dim, seed));
    for sequence in [0, sequences - 1] {
        let mut held = [Vec::new(), Vec::new()];
        for span in cache.dequantize(layer, sequence)? {
            for (held, rows) in held.iter_mut().zip([&span.keys, &span.values]) {
                let rows = backend.download(rows).await?;
                let of_token = |token: usize| (0..shape.kv_heads()).map(move |head| (head * span.tokens + token) * dim);
                held.extend(
                    (0..span.tokens)
                        .map(|token| of_token(token).flat_map(|at| &rows[at..at + dim]).copied().collect::<Vec<f32>>()),
                );
            }
        }
        for ((what, held), given) in ["keys", "values"].into_iter().zip(&held).zip(&given) {
            let given = given[sequence * row..][..row].iter().map(|x| x.to_f64()).collect::<Vec<_>>();
            for ((tokens, most), skipped) in [(NEWEST, 0), (OLDER, NEWEST.0)] {
                let tokens: Vec<f32> = held.iter().rev().take(tokens).skip(skipped).flatten().copied().collect();
                let error = nmse(&tokens, &given.repeat(tokens.len() / row));
                let wrong = || Wrong(format!("steps stored other {what} than they were given: NMSE {error:.1e}"));
                ensure!(!tokens.is_empty() && error <= most, wrong());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvpack::AttentionShape;
    use kvpack::backend::Device;
    use kvpack::cache::{ModelCache, ModelRecipe, TokenRun};
    use kvpack::cpu::Cpu;
    use kvpack::plan::{Elements, RowLayout};
    use pollster::block_on;

    use super::*;

    /// Steps that store nothing, or the row of another sequence, do not pass.
    #[test]
    fn what_is_stored_is_what_was_given() {
        let shape = AttentionShape::new(4, 2, 64).unwrap();
        for recipe in ["f16", "saw-int4", "calibquant:2", "kivi:2"] {
            let recipe = recipe.parse::<ModelRecipe>().unwrap().layer(0, &shape);
            for (mistake, passes) in [(0, true), (1, false), (2, false)] {
                let mut cache = ModelCache::new(&Cpu::new(), &[(shape, recipe.clone())], 2).unwrap();
                let mut rows = [KEYS, VALUES].map(|seed| random_rows(2 * 2 * 64, 64, seed));
                match mistake {
                    1 => rows[1].fill(half::f16::ZERO),
                    2 => rows[0].rotate_left(2 * 64),
                    _ => {}
                }
                let [keys, values] = rows.map(|rows| block_on(Cpu::new().upload(Elements::F16(&rows))).unwrap());
                let runs = [TokenRun::decode(0), TokenRun::decode(1)];
                for _ in 0..ALL_STEPS {
                    block_on(cache.reserve_for_append(&runs)).unwrap();
                    cache.begin_append(&runs).unwrap();
                    block_on(cache.store(0, RowLayout::token_major(2, &shape), &keys, &values)).unwrap();
                    cache.commit().unwrap();
                }
                let checked = block_on(check(&Cpu::new(), &cache, 0, 2));
                assert_eq!(checked.is_ok(), passes, "mistake {mistake}: {checked:?}");
            }
        }
    }
}
