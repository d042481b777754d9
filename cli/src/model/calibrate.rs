//! Weights quantised layer by layer, for the inputs that a text gives them.
//!
//! The text runs through one layer at a time. The inputs of its projections are recorded, the projections are quantised
//! for them, and the text runs through the layer again with the quantised weights: layers that follow see the errors of
//! those before them. GPTAQ also runs the text through the layers in full precision. Memory holds the text's stream and
//! the inputs of one layer.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use half::f16;
use kvpack_weights::QuantizedLinear;
use kvpack_weights::quantize::{
    AwqOptions, Clip, GptaqOptions, Gptq, GptqOptions, GptqReport, Hessian, Matrix, PairedHessian, awq_scaled,
    awq_scales, gptaq, gptq, round_to_nearest,
};

use super::projections::{Input, Projection};
use super::quantized::QuantizedModel;
use super::{CHUNK_TOKENS, ExactAttention, Model};

/// How weights are quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Method {
    /// Each weight to the nearest level; needs no text.
    Rtn,
    /// Errors are made up for by the weights that follow.
    Gptq,
    /// The same, against the outputs of the full-precision model.
    Gptaq,
    /// Inputs that matter are scaled up first.
    Awq,
}

/// What a model is quantised with.
pub struct Calibration {
    /// The method.
    pub method: Method,
    /// The grid, and how GPTQ and GPTAQ run.
    pub options: GptqOptions,
}

/// What a user should know of a model that was quantised.
#[derive(Debug, Default)]
pub struct Remarks {
    /// Codes that GPTQ or GPTAQ clamped to the grid.
    pub clamped: u64,
    /// Projections whose Hessian needed more damping, and how much.
    pub damped: Vec<(String, f64)>,
    /// Projections with inputs that were always 0, and how many.
    pub dead: Vec<(String, usize)>,
}

impl Remarks {
    fn take(&mut self, name: &str, report: &GptqReport, damping: f64) {
        self.clamped += report.clamped;
        if report.damping > damping {
            self.damped.push((name.into(), report.damping));
        }
        if report.dead_inputs > 0 {
            self.dead.push((name.into(), report.dead_inputs));
        }
    }
}

/// Inputs of the projections of a layer, `[tokens, inputs]`.
type Inputs = BTreeMap<Input, Vec<f32>>;

impl Calibration {
    /// Quantises a model and leaves it with the quantised weights; `done` is called after each projection.
    ///
    /// # Errors
    /// Weights or activations that are not finite, and what the format cannot store.
    pub fn quantize(
        &self,
        model: &mut Model,
        tokens: &[u32],
        into: &mut QuantizedModel,
        done: &mut dyn FnMut(&str),
    ) -> Result<Remarks> {
        let mut remarks = Remarks::default();
        let mut stream = Stream::new(model, tokens)?;
        let mut full = if self.method == Method::Gptaq { Some(stream.clone()) } else { None };
        for index in 0..model.config.layers {
            let seen = if self.method == Method::Rtn { Inputs::new() } else { stream.clone().advance(model, index)? };
            let in_full = full.as_mut().map(|full| full.advance(model, index)).transpose()?;
            match self.method {
                Method::Awq => self.awq(model, index, seen, into, done)?,
                _ => {
                    let mut quantized = |name: &str, report: Option<&GptqReport>| {
                        report.into_iter().for_each(|report| remarks.take(name, report, self.options.damping));
                        done(name);
                    };
                    self.each(model, index, (&seen, in_full.as_ref()), into, &mut quantized)?;
                }
            }
            if self.method != Method::Rtn {
                stream.advance(model, index)?;
            }
        }
        Ok(remarks)
    }

    /// The projections of a layer, each by itself.
    fn each(
        &self,
        model: &mut Model,
        index: usize,
        (seen, full): (&Inputs, Option<&Inputs>),
        into: &mut QuantizedModel,
        done: &mut dyn FnMut(&str, Option<&GptqReport>),
    ) -> Result<()> {
        for input in Input::ALL {
            let inputs = model.layer_mut(index).projection(input.projections()[0]).weight()?.dim(1)?;
            let moments = Moments::new(inputs, seen.get(&input), full.and_then(|full| full.get(&input)))?;
            for &projection in input.projections() {
                let name = projection.name(index);
                let weights = Weights::of(model, index, projection)?;
                let w = weights.matrix()?;
                let quantized = match &moments {
                    Moments::None => round_to_nearest(w, &self.options.grid).map(|linear| (linear, None)),
                    Moments::Own(hessian) => gptq(w, hessian, &self.options).map(with_report),
                    Moments::Paired(moments) => gptaq(w, moments, &GptaqOptions::new(self.options)).map(with_report),
                };
                let (linear, report) = quantized.with_context(|| format!("cannot quantise {name}"))?;
                store(model, index, projection, &linear, into)?;
                done(&name, report.as_ref());
            }
        }
        Ok(())
    }

    /// The projections of a layer by AWQ: scales are folded into the norms, and those of `ffn_down` into `ffn_up`.
    /// Nothing takes up scales of what attention returns.
    fn awq(
        &self,
        model: &mut Model,
        index: usize,
        mut seen: Inputs,
        into: &mut QuantizedModel,
        done: &mut dyn FnMut(&str),
    ) -> Result<()> {
        // The scales of ffn_down change ffn_up, which is quantised before.
        for input in [Input::Down, Input::Attention, Input::AttentionOutput, Input::FeedForward] {
            let activations = seen.remove(&input).context("no input was recorded")?;
            let projections = input.projections();
            let weights = projections.iter().map(|&projection| Weights::of(model, index, projection));
            let weights = weights.collect::<Result<Vec<_>>>()?;
            let matrices = weights.iter().map(Weights::matrix).collect::<Result<Vec<_>>>()?;
            let inputs = matrices[0].columns();
            let x = Matrix::new(activations.len() / inputs, inputs, &activations)?;
            let mut scales = vec![1.0; inputs];
            let takes_scales = match input {
                Input::Attention | Input::FeedForward => true,
                Input::Down => !model.layer_mut(index).projection(Projection::Up).has_bias(),
                Input::AttentionOutput => false,
            };
            if takes_scales {
                scales = fold(model, index, input, &awq_scales(&matrices, x, &self.options.grid)?.scales, into)?;
            }
            for (&projection, &w) in projections.iter().zip(&matrices) {
                let name = projection.name(index);
                // As published: clipping what scores are made of costs more than it saves.
                let clip = match projection {
                    Projection::Query | Projection::Key => Clip::Never,
                    _ => Clip::Searched,
                };
                let options = AwqOptions { grid: self.options.grid, clip };
                let linear = awq_scaled(w, x, &scales, &options).with_context(|| format!("cannot quantise {name}"))?;
                store(model, index, projection, &linear, into)?;
                done(&name);
            }
        }
        Ok(())
    }
}

fn with_report(quantized: Gptq) -> (QuantizedLinear, Option<GptqReport>) {
    (quantized.linear, Some(quantized.report))
}

/// Divides an input by scales, in whatever makes it; returns the scales that this came to.
fn fold(model: &mut Model, index: usize, input: Input, scales: &[f32], into: &mut QuantizedModel) -> Result<Vec<f32>> {
    let layer = model.layer_mut(index);
    let Some(norm) = layer.norm_before(input) else {
        let up = layer.projection(Projection::Up);
        let by = Tensor::new(scales, &Device::Cpu)?.reshape((scales.len(), 1))?;
        up.set_weight(up.weight()?.broadcast_div(&by)?);
        return Ok(scales.to_vec());
    };
    let old = norm.to_vec1::<f32>()?;
    // Norms are stored in f16: the scales are what that makes of them.
    let new: Vec<f32> = old.iter().zip(scales).map(|(old, scale)| f16::from_f32(old / scale).to_f32()).collect();
    *norm = Tensor::new(&*new, &Device::Cpu)?;
    into.add_norm(&input.norm_name(index).context("a norm without a name")?, &new)?;
    let came_to =
        old.iter().zip(&new).zip(scales).map(|((old, new), &scale)| if *new == 0.0 { scale } else { old / new });
    Ok(came_to.collect())
}

/// Sets the weights of a projection to its quantised form, and keeps that.
fn store(
    model: &mut Model,
    index: usize,
    projection: Projection,
    linear: &QuantizedLinear,
    into: &mut QuantizedModel,
) -> Result<()> {
    into.add(index, projection, linear)?;
    let shape = (linear.shape().outputs(), linear.shape().inputs());
    let weight = Tensor::from_vec(linear.dequantize::<f32>(), shape, &Device::Cpu)?;
    model.layer_mut(index).projection(projection).set_weight(weight);
    Ok(())
}

/// Weights of a projection, `[outputs, inputs]`.
struct Weights {
    shape: (usize, usize),
    values: Vec<f32>,
}

impl Weights {
    fn of(model: &mut Model, index: usize, projection: Projection) -> Result<Self> {
        let weight = model.layer_mut(index).projection(projection).weight()?;
        Ok(Self { shape: weight.dims2()?, values: weight.flatten_all()?.to_vec1()? })
    }

    fn matrix(&self) -> Result<Matrix<'_>> {
        Ok(Matrix::new(self.shape.0, self.shape.1, &self.values)?)
    }
}

/// What GPTQ and GPTAQ know of an input.
enum Moments {
    None,
    Own(Hessian),
    Paired(PairedHessian),
}

impl Moments {
    /// Those of an input of `inputs` elements, from what the layer took, and from what it takes in full precision.
    fn new(inputs: usize, seen: Option<&Vec<f32>>, full: Option<&Vec<f32>>) -> Result<Self> {
        let matrix = |values| Matrix::new(Vec::len(values) / inputs, inputs, values);
        Ok(match (seen, full) {
            (Some(seen), Some(full)) => {
                let mut moments = PairedHessian::new(inputs)?;
                moments.add(matrix(seen)?, matrix(full)?)?;
                Self::Paired(moments)
            }
            (Some(seen), None) => {
                let mut hessian = Hessian::new(inputs)?;
                hessian.add(matrix(seen)?)?;
                Self::Own(hessian)
            }
            (None, _) => Self::None,
        })
    }
}

/// Tokens of the sequences that a text is cut into, where the model's context has that many.
const SEQUENCE_TOKENS: usize = 2048;

/// The residual streams of the sequences of a text before a layer, in chunks.
#[derive(Clone)]
struct Stream {
    sequences: Vec<Vec<Tensor>>,
}

impl Stream {
    fn new(model: &Model, tokens: &[u32]) -> Result<Self> {
        let embedded = |sequence: &[u32]| sequence.chunks(CHUNK_TOKENS).map(|chunk| model.embedded(chunk)).collect();
        let sequences = tokens.chunks(SEQUENCE_TOKENS.min(model.config.context).max(1));
        Ok(Self { sequences: sequences.map(embedded).collect::<Result<_>>()? })
    }

    /// Runs through a layer; returns what its projections took.
    fn advance(&mut self, model: &Model, index: usize) -> Result<Inputs> {
        let mut inputs = Inputs::new();
        let mut watch = |input: Input, x: &Tensor| -> Result<()> {
            inputs.entry(input).or_default().extend(x.flatten_all()?.to_vec1::<f32>()?);
            Ok(())
        };
        for sequence in &mut self.sequences {
            let mut attention = ExactAttention::new(&model.config);
            let mut position = 0;
            for chunk in sequence {
                let tokens = chunk.dim(0)?;
                let rotations = model.rotations(position, tokens)?;
                *chunk = model.layer(index, chunk, &rotations, &mut attention, &mut watch)?;
                position += tokens;
            }
        }
        Ok(inputs)
    }
}

#[cfg(test)]
mod tests {
    use kvpack::cpu::nmse;
    use kvpack_weights::checkpoint::WrittenFormat;
    use kvpack_weights::quantize::{ColumnOrder, Grid, ScaleType, Symmetry};
    use kvpack_weights::{Bits, GroupSize};

    use super::*;
    use crate::model::tiny;

    fn logits(model: &Model, tokens: &[u32]) -> Vec<f32> {
        tiny::logits(model, &mut ExactAttention::new(&model.config), tokens, &[128, 128, tokens.len() - 256])
    }

    /// The logits of a tiny model before and after, and the logits of the folder that was written.
    fn quantized(name: &str, method: Method, bits: Bits, format: WrittenFormat) -> [Vec<f32>; 3] {
        let (gguf, mut model) = tiny::model(name);
        let tokens = tiny::tokens(&model, 380);
        let before = logits(&model, &tokens);
        let group = GroupSize::Inputs(32);
        let grid = Grid { bits, group, symmetry: Symmetry::Asymmetric, scales: ScaleType::F16 };
        let mut options = GptqOptions::new(grid);
        if method == Method::Gptq {
            options.order = ColumnOrder::Activations;
        }
        let mut into = QuantizedModel::new(format, group);
        let mut done = 0;
        let calibration = Calibration { method, options };
        let remarks = calibration.quantize(&mut model, &tokens, &mut into, &mut |_| done += 1).unwrap();
        assert!(remarks.damped.is_empty() && remarks.dead.is_empty(), "{remarks:?}");
        assert_eq!(done, 7 * model.config.layers);
        // Scales and zeros of 32 weights have 16 bits and those of a code.
        assert!((into.bits_per_weight() - f64::from(bits.count()) * (1.0 + 1.0 / 32.0) - 0.5).abs() < 1e-9);
        let folder = tempfile::tempdir().unwrap();
        into.write(folder.path(), gguf.path()).unwrap();
        [before, logits(&model, &tokens), logits(&Model::load(folder.path()).unwrap(), &tokens)]
    }

    /// Eight bits lose next to nothing, and the folder holds the model that was made.
    #[test]
    fn folders_hold_what_was_made() {
        for (number, (method, format)) in [
            (Method::Rtn, WrittenFormat::GptqV2),
            (Method::Gptq, WrittenFormat::GptqV2),
            (Method::Gptaq, WrittenFormat::GptqV2),
            (Method::Awq, WrittenFormat::GptqV2),
        ]
        .into_iter()
        .enumerate()
        {
            let [before, after, loaded] = quantized(&format!("quantized-{number}"), method, Bits::Eight, format);
            assert_eq!(after, loaded, "{method:?}");
            let before: Vec<f64> = before.iter().map(|&x| x.into()).collect();
            let error = nmse(&after, &before);
            assert!(error > 0.0 && error < 1e-3, "{method:?}: {error}");
        }
        let [_, after, loaded] = quantized("quantized-awq", Method::Awq, Bits::Four, WrittenFormat::AwqGemm);
        assert_eq!(after, loaded);
    }

    #[test]
    fn calibrated_weights_lose_less() {
        let error = |method| {
            let [before, after, _] = quantized(&format!("lose-{method:?}"), method, Bits::Four, WrittenFormat::GptqV2);
            nmse(&after, &before.iter().map(|&x| x.into()).collect::<Vec<f64>>())
        };
        let [rtn, gptq, gptaq, awq] = [Method::Rtn, Method::Gptq, Method::Gptaq, Method::Awq].map(error);
        println!("{rtn} {gptq} {gptaq} {awq}");
        assert!(gptq < 0.8 * rtn && gptaq < 0.8 * rtn && awq < 0.95 * rtn, "{rtn} {gptq} {gptaq} {awq}");
    }

    /// A text of one token repeated gives a Hessian of rank 1 in the first layer.
    #[test]
    fn remarks_name_what_needed_damping() {
        let (_gguf, mut model) = tiny::model("remarks");
        let group = GroupSize::Inputs(32);
        let grid = Grid { bits: Bits::Four, group, symmetry: Symmetry::Asymmetric, scales: ScaleType::F16 };
        let options = GptqOptions { damping: 1e-19, ..GptqOptions::new(grid) };
        let mut into = QuantizedModel::new(WrittenFormat::GptqV2, group);
        let calibration = Calibration { method: Method::Gptq, options };
        let remarks = calibration.quantize(&mut model, &[5; 8], &mut into, &mut |_| ()).unwrap();
        assert!(remarks.damped.iter().any(|(name, damping)| name == "blk.0.attn_q" && *damping > 1e-19), "{remarks:?}");
    }

    /// A text longer than the context is cut: both halves of a repeated text give the same inputs.
    #[test]
    fn long_texts_are_cut_into_sequences() {
        let (_gguf, model) = tiny::model("sequences");
        let sequence = tiny::tokens(&model, model.config.context);
        let inputs = |tokens: &[u32]| Stream::new(&model, tokens).unwrap().advance(&model, 0).unwrap();
        let (once, twice) = (inputs(&sequence), inputs(&[&sequence[..], &sequence[..]].concat()));
        assert_eq!(twice[&Input::Down], [&once[&Input::Down][..], &once[&Input::Down][..]].concat());
    }
}
