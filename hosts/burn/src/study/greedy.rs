//! Greedy texts of a model with kvpack's attention and with burn's own.

use burn::tensor::Device;
use kvpack::cache::ModelCache;
use kvpack::wgpu::Wgpu;
use kvpack_serving::study::PROMPT;

use super::gguf::Gguf;
use super::own::OwnAttention;
use super::steps::begun;
use crate::Result;
use crate::host::Host;

/// Writes a greedy text with kvpack's attention in f16 and one with burn's own, and compares them. False where they
/// differ.
pub fn compared(device: &Device, backend: &Wgpu, host: &mut Host, (gguf, output): (&Gguf, usize)) -> Result<bool> {
    let prompt = gguf.tokenizer.encode_text(PROMPT)?;
    let mut own = OwnAttention::new(device, host.config(), 1, (0, prompt.len() + output));
    let expected = continued(&prompt, output, |token, position| {
        let stream = host.decoder().forward(&[token], &[position], &mut |layer, rows| own.attend(layer, rows))?;
        own.step();
        host.decoder().largest(stream)
    })?;
    let mut cache = ModelCache::new(backend, &host.config().cache_layers(&"f16".parse()?), 1)?;
    let given = continued(&prompt, output, |token, _| {
        let batch = begun(&mut cache, &[token])?;
        let stream = host.stream(&cache, &batch)?;
        let next = host.decoder().largest(stream)?;
        cache.commit()?;
        Ok(next)
    })?;
    let same = given.iter().zip(&expected).take_while(|(given, expected)| given == expected).count();
    let verdict = if same == output { "equal" } else { "DIFFERENT" };
    println!("greedy text of {output} tokens, kvpack in f16 and burn in f32: the first {same} are equal: {verdict}\n");
    Ok(same == output)
}

/// The tokens that follow a prompt, which is read token by token.
fn continued(prompt: &[u32], output: usize, mut next: impl FnMut(u32, usize) -> Result<Vec<u32>>) -> Result<Vec<u32>> {
    let mut text = prompt.to_vec();
    for at in 0..prompt.len() + output - 1 {
        let largest = next(text[at], at)?;
        if at + 1 >= prompt.len() {
            text.extend(largest);
        }
    }
    Ok(text.split_off(prompt.len()))
}
