//! Greedy texts of a model with kvpack's attention and with candle's own. Where they part, the logits of both are
//! compared with those of the same weights in f32.

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use kvpack::cache::ModelCache;
use kvpack_serving::study::PROMPT;

use crate::filled;
use crate::host::Host;
use crate::own;
use crate::rig::Rig;

/// Compares the greedy text of the model with the text that candle's own attention gives.
pub fn compared<R: Rig>(rig: &R, mut host: Host<R::Steps>, output: usize) -> Result<(Host<R::Steps>, String)> {
    let vocabulary = host.model().tokenizer.vocabulary() as u32;
    // Random models know no text.
    let prompt = host.model().tokenizer.encode_text(PROMPT).ok().filter(|prompt| !prompt.is_empty());
    let prompt = prompt.unwrap_or_else(|| (0..24u32).map(|at| (at * at * 131 + 17 * at + 5) % vocabulary).collect());
    let expected = own::greedy(rig, host.model(), &prompt, output)?;
    let given = of_kvpack(rig, &mut host, &prompt, output)?.0;
    let same = given.iter().zip(&expected).take_while(|(given, expected)| given == expected).count();
    let verdict = if same == output { "equal" } else { "DIFFERENT" };
    let text =
        format!("greedy text of {output} tokens in f16, kvpack and candle: the first {same} are equal: {verdict}");
    if same == output {
        return Ok((host, text));
    }
    let read: Vec<u32> = prompt.iter().chain(&expected[..same]).copied().collect();
    let (host, parted) = at_parting(rig, host, &read)?;
    Ok((host, format!("{text}\n{parted}")))
}

/// The logits behind a text: by kvpack, by candle, and in f32.
fn at_parting<R: Rig>(rig: &R, mut host: Host<R::Steps>, read: &[u32]) -> Result<(Host<R::Steps>, String)> {
    let kvpack = of_kvpack(rig, &mut host, read, 1)?.1;
    let candle = own::logits(rig, host.model(), read)?;
    let dtype = host.model().dtype();
    let host = host.changed(|model| rig.on_device(model, DType::F32))?;
    let exact = own::logits(rig, host.model(), read)?;
    let host = host.changed(|model| rig.on_device(model, dtype))?;
    let mut sorted = exact.clone();
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    let gap = sorted.first().zip(sorted.get(1)).map(|(first, second)| first - second).context("there are no logits")?;
    let errors = |given: &[f32]| {
        let errors = given.iter().zip(&exact).map(|(given, exact)| f64::from(given - exact).abs());
        let squares = errors.clone().map(|error| error * error).sum::<f64>() / exact.len() as f64;
        (errors.fold(0.0, f64::max), squares.sqrt())
    };
    let [(most, root), (most_of_candle, root_of_candle)] = [errors(&kvpack), errors(&candle)];
    Ok((
        host,
        format!(
            "behind token {} of the text the two largest logits in f32 differ by {gap:.1e}; logits in f16 are off by at \
             most {most:.1e}, {root:.1e} in the mean square (kvpack), {most_of_candle:.1e}, {root_of_candle:.1e} (candle)",
            read.len()
        ),
    ))
}

/// The greedy text with kvpack's attention in f16, token by token, and the logits of its last token.
fn of_kvpack<R: Rig>(
    rig: &R,
    host: &mut Host<R::Steps>,
    prompt: &[u32],
    output: usize,
) -> Result<(Vec<u32>, Vec<f32>)> {
    let layers = host.model().config.cache_layers(&"f16".parse()?)?;
    let mut cache = ModelCache::new(rig.backend(), &layers, 1)?;
    let (mut text, mut last) = (prompt.to_vec(), None);
    for at in 0..prompt.len() + output - 1 {
        let logits = filled::logits(host, &mut cache, &text[at..at + 1])?;
        if at + 1 >= prompt.len() {
            text.extend(own::largest(&logits)?);
        }
        last = Some(logits);
    }
    Ok((text.split_off(prompt.len()), row(&last.context("there is no text")?)?))
}

/// The logits of the only row.
fn row(logits: &Tensor) -> Result<Vec<f32>> {
    Ok(logits.to_dtype(DType::F32)?.get(0)?.to_vec1()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{CpuRig, CpuSteps};
    use crate::checks;

    /// A study without graphs stays one, whatever the texts are.
    #[test]
    fn steps_are_launched_as_before_where_texts_part() {
        let host = Host::new(checks::model("llama").unwrap(), CpuSteps);
        let (host, _) = at_parting(&CpuRig::default(), host.without_records(), &[5, 6, 7]).unwrap();
        assert!(!host.records());
    }
}
