//! The ops of KIVI.

use anyhow::{Context, Result, ensure};
use kvpack::Bits;
use kvpack::format::interchange::kivi::{ScaleRounding, pack, quantize_group};
use kvpack::format::{AffineFormat, CodeRange, Grouping, HEAD_DIMS, KeyOrValue, TensorFormat};

use super::file::{Elements, GoldenFile};
use super::stored::Packed;
use super::{Outputs, named};

/// `kivi.quantize_k`: groups of tokens of one channel, packed along the tokens.
pub fn quantize_k(file: &GoldenFile) -> Result<Vec<(&'static str, Outputs)>> {
    run(file, KeyOrValue::Key)
}

/// `kivi.quantize_v`: groups of channels of one token, packed along the channels.
pub fn quantize_v(file: &GoldenFile) -> Result<Vec<(&'static str, Outputs)>> {
    run(file, KeyOrValue::Value)
}

/// By KIVI's own arithmetic; and by the kernel where the two must agree: ranges in f16 as the kernel stores them, a
/// head dimension that it serves, and steps whose f16 rounding moves no code. At 4 bits and without exact scales it
/// moves about one in ten thousand.
fn run(file: &GoldenFile, which: KeyOrValue) -> Result<Vec<(&'static str, Outputs)>> {
    let [_, _, _, channels] = file.input("x")?.axes()?;
    let is_f16 = matches!(file.input("x")?.elements, Elements::F16(_));
    let mut kernels = vec![("format::kivi", stepwise(file, which, is_f16)?)];
    let rounding_is_harmless = file.has_param("ties") || bits(file)? == Bits::Two;
    if is_f16 && rounding_is_harmless && !file.has_param("strict_f16") && HEAD_DIMS.contains(&channels) {
        kernels.push(("quantize", quantized(file, which)?));
    }
    Ok(kernels)
}

/// The elements that share a range, as `(first, step, count)` of group `group` of one head's `[tokens, channels]`.
fn group_places(which: KeyOrValue, channels: usize, group: usize, index: usize) -> impl Iterator<Item = usize> {
    let (first, step) = match which {
        KeyOrValue::Key => (index / channels * group * channels + index % channels, channels),
        KeyOrValue::Value => (index * group, 1),
    };
    (0..group).map(move |i| first + i * step)
}

fn stepwise(file: &GoldenFile, which: KeyOrValue, is_f16: bool) -> Result<Outputs> {
    let [_, _, tokens, channels] = file.input("x")?.axes()?;
    let (bits, group) = (bits(file)?, file.number("group")? as usize);
    let rounding = if is_f16 { ScaleRounding::F16 } else { ScaleRounding::F32 };
    let x = file.input("x")?.f32()?;
    let (axis, length) = match which {
        KeyOrValue::Key => ("tokens", tokens),
        KeyOrValue::Value => ("channels", channels),
    };
    ensure!(group > 0 && length.is_multiple_of(group), "groups of {group} do not divide {length} {axis}");
    let mut parts = Parts::default();
    for head in x.chunks_exact(tokens * channels) {
        let mut codes = vec![0; head.len()];
        let mut values = vec![0.0; head.len()];
        for index in 0..head.len() / group {
            let places: Vec<usize> = group_places(which, channels, group, index).collect();
            let elements: Vec<f32> = places.iter().map(|&at| head[at]).collect();
            let quantized = quantize_group(&elements, bits, rounding);
            parts.ranges.push(quantized.range);
            for ((&at, &code), value) in places.iter().zip(&quantized.codes).zip(quantized.dequantize(rounding)) {
                (codes[at], values[at]) = (code, value);
            }
        }
        parts.add_head(which, channels, bits, &codes, &values)?;
    }
    Ok(parts.outputs())
}

/// The same through the kernel and its f16 ranges next to each tile.
fn quantized(file: &GoldenFile, which: KeyOrValue) -> Result<Outputs> {
    let [_, _, tokens, channels] = file.input("x")?.axes()?;
    let (bits, group) = (bits(file)?, file.number("group")? as usize);
    let grouping = match which {
        KeyOrValue::Key => Grouping::ChannelTokens(group),
        KeyOrValue::Value => Grouping::TokenChannels(group),
    };
    let format = TensorFormat::Affine(AffineFormat::new(bits, grouping));
    let mut parts = Parts::default();
    for head in file.input("x")?.f32()?.chunks_exact(tokens * channels) {
        let packed = Packed::new(format, which, channels, head)?;
        for index in 0..head.len() / group {
            let at = group_places(which, channels, group, index).next().context("an empty group")?;
            parts.ranges.push(packed.range(at / channels, at % channels));
        }
        parts.add_head(which, channels, bits, &packed.codes, &packed.decoded)?;
    }
    Ok(parts.outputs())
}

/// The outputs, head after head.
#[derive(Default)]
struct Parts {
    packed: Vec<f64>,
    ranges: Vec<CodeRange>,
    values: Vec<f64>,
}

impl Parts {
    /// Adds the codes and values `[tokens, channels]` of a head.
    fn add_head(&mut self, which: KeyOrValue, channels: usize, bits: Bits, codes: &[u8], values: &[f32]) -> Result<()> {
        self.values.extend(values.iter().map(|&x| f64::from(x)));
        let words: Vec<i32> = match which {
            KeyOrValue::Value => pack(codes, bits)?,
            // Along the tokens of each channel; then back to [words of tokens, channels].
            KeyOrValue::Key => {
                let tokens = codes.len() / channels;
                let by_channel: Vec<u8> = (0..codes.len()).map(|i| codes[i % tokens * channels + i / tokens]).collect();
                let words = pack(&by_channel, bits)?;
                let per_channel = words.len() / channels;
                (0..words.len()).map(|i| words[i % channels * per_channel + i / channels]).collect()
            }
        };
        self.packed.extend(words.into_iter().map(f64::from));
        Ok(())
    }

    fn outputs(self) -> Outputs {
        let scale = self.ranges.iter().map(|range| f64::from(range.scale)).collect();
        let min = self.ranges.iter().map(|range| f64::from(range.min)).collect();
        named([("packed", self.packed), ("scale", scale), ("min", min), ("dequant", self.values)])
    }
}

fn bits(file: &GoldenFile) -> Result<Bits> {
    Bits::from_count(file.number("bits")? as u32).context("codes of a width that kvpack does not have")
}
