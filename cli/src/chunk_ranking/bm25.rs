//! BM25: how much chunks of a text resemble a query by the words they share, without any model (Cocktail's Table IV).

use std::collections::{HashMap, HashSet};

/// The usual constants.
const K1: f64 = 1.5;
const B: f64 = 0.75;

/// The score of every chunk.
pub fn bm25(query: &str, chunks: &[String]) -> Vec<f32> {
    let chunks: Vec<Vec<String>> = chunks.iter().map(|chunk| words(chunk)).collect();
    let count = chunks.len() as f64;
    let mean_length = (chunks.iter().map(Vec::len).sum::<usize>() as f64 / count).max(1.0);
    let mut holding: HashMap<&str, f64> = HashMap::new();
    for chunk in &chunks {
        let different: HashSet<&str> = chunk.iter().map(String::as_str).collect();
        different.into_iter().for_each(|word| *holding.entry(word).or_default() += 1.0);
    }
    let mut query = words(query);
    query.sort_unstable();
    query.dedup();
    let score = |chunk: &Vec<String>| {
        let of_word = |word: &String| {
            let here = chunk.iter().filter(|other| *other == word).count() as f64;
            let holding = holding.get(word.as_str()).copied().unwrap_or(0.0);
            let rarity = ((count - holding + 0.5) / (holding + 0.5) + 1.0).ln();
            rarity * here * (K1 + 1.0) / (here + K1 * (1.0 - B + B * chunk.len() as f64 / mean_length))
        };
        query.iter().map(of_word).sum::<f64>() as f32
    };
    chunks.iter().map(score).collect()
}

fn words(text: &str) -> Vec<String> {
    text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).map(str::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use super::bm25;

    #[test]
    fn rare_words_weigh_more() {
        let chunks = ["the rabbit ran", "the Queen of hearts", "the tea, the hatter", "the end"].map(String::from);
        let scores = bm25("Where did the rabbit go?", &chunks);
        assert!(scores[0] > scores[1] && scores[0] > scores[2] && scores[0] > scores[3], "{scores:?}");
        assert_eq!(bm25("nothing of it", &["a".into(), "b".into()]), [0.0, 0.0]);
        // More of the same word weighs more, but not twice as much.
        let scores = bm25("tea", &["tea cup".into(), "tea tea".into(), "x y".into()]);
        assert!(scores[1] > scores[0] && scores[1] < 2.0 * scores[0], "{scores:?}");
    }
}
