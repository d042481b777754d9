//! What an answer attends to of its prompt, and how much of that stays in a cache.

use anyhow::Result;
use kvpack::policy::{Selection, top_k};
use kvpack_report::ByModality;

use super::super::score::mean;

/// The attention of an answer's tokens in full precision.
pub struct Attended {
    /// Of each layer, `[kv_heads, tokens]`: what a token gets from the answer's tokens. Those of the prompt come first,
    /// of them the document.
    pub layers: Vec<Vec<f32>>,
    /// KV heads of every layer.
    pub kv_heads: usize,
    /// Tokens of the document.
    pub document: usize,
    /// Tokens of the prompt: the document, and the question after it.
    pub prompt: usize,
}

impl Attended {
    /// Contribution of a modality: the share of what the answer attends to in its prompt that falls to it, the mean
    /// over layers and KV heads.
    pub fn contribution(&self) -> ByModality {
        let shares: Vec<f64> =
            self.heads().map(|(_, _, attended)| sum(&attended[..self.document]) / sum(attended)).collect();
        let document = mean(&shares);
        ByModality { document, text: 1.0 - document }
    }

    /// Coverage of a modality: of what the answer attends to in it, the share that falls to tokens that are kept, the
    /// mean over layers and KV heads. Tokens that were merged into kept ones count as evicted.
    pub fn coverage(&self, selection: &Selection) -> ByModality {
        let of = |tokens: std::ops::Range<usize>| {
            let covered = self.heads().map(|(layer, head, attended)| {
                let kept = selection.layers()[layer].kept(head).iter().map(|&token| token as usize);
                let kept: f64 =
                    kept.filter(|token| tokens.contains(token)).map(|token| f64::from(attended[token])).sum();
                kept / sum(&attended[tokens.clone()])
            });
            mean(&covered.collect::<Vec<_>>())
        };
        ByModality { document: of(0..self.document), text: of(self.document..self.prompt) }
    }

    /// Of the kept tokens of every layer and KV head the share that is among as many tokens of the prompt to which the
    /// answer attends most, their mean (VL-Cache's CacheHitRate).
    pub fn hit_rate(&self, selection: &Selection) -> Result<f64> {
        let mut rates = Vec::new();
        for (layer, head, attended) in self.heads() {
            let kept = selection.layers()[layer].kept(head);
            if kept.is_empty() {
                continue;
            }
            let best = top_k(attended, kept.len())?;
            let hits = best.iter().filter(|token| kept.binary_search(token).is_ok()).count();
            rates.push(hits as f64 / kept.len() as f64);
        }
        Ok(if rates.is_empty() { 0.0 } else { mean(&rates) })
    }

    /// Layer, KV head, and what every token of the prompt gets there.
    fn heads(&self) -> impl Iterator<Item = (usize, usize, &[f32])> {
        self.layers.iter().enumerate().flat_map(move |(layer, attended)| {
            let heads = attended.chunks_exact(attended.len() / self.kv_heads).enumerate();
            heads.map(move |(head, attended)| (layer, head, &attended[..self.prompt]))
        })
    }
}

fn sum(attended: &[f32]) -> f64 {
    attended.iter().map(|&attended| f64::from(attended)).sum()
}

#[cfg(test)]
mod tests {
    use kvpack::policy::LayerSelection;

    use super::*;

    /// One layer of two KV heads; three tokens of a document, two of a question, and one of the answer, which is no
    /// part of the prompt.
    #[test]
    fn attention_is_shared_out_by_modality() {
        let layers = vec![vec![1.0, 2.0, 1.0, 3.0, 1.0, 9.0, 0.0, 4.0, 0.0, 1.0, 3.0, 9.0]];
        let attended = Attended { layers, kv_heads: 2, document: 3, prompt: 5 };
        let contribution = attended.contribution();
        assert_eq!(contribution, ByModality { document: (4.0 / 8.0 + 4.0 / 8.0) / 2.0, text: 0.5 });
        let selection = Selection::new(vec![LayerSelection::new(5, vec![vec![1, 3], vec![0, 4]]).unwrap()]).unwrap();
        let coverage = attended.coverage(&selection);
        assert_eq!(coverage, ByModality { document: (2.0 / 4.0 + 0.0) / 2.0, text: (3.0 / 4.0 + 3.0 / 4.0) / 2.0 });
        // The two best of the first head are 1 and 3, of the second 1 and 4.
        assert_eq!(attended.hit_rate(&selection).unwrap(), (1.0 + 0.5) / 2.0);
        let all = Selection::new(vec![LayerSelection::new(5, vec![(0..5).collect(); 2]).unwrap()]).unwrap();
        assert_eq!(attended.coverage(&all), ByModality { document: 1.0, text: 1.0 });
        assert_eq!(attended.hit_rate(&all).unwrap(), 1.0);
    }
}
