//! GPTQ checkpoints: `qweight`, `qzeros`, `scales`, `g_idx`.
//!
//! | tensor | shape | content |
//! | --- | --- | --- |
//! | `qweight` | `[K · b / 32, N]` i32 | each column a dense bit stream along K: code k at the bits `b·k ..` |
//! | `qzeros` | `[ceil(K / g), N · b / 32]` i32 | each row such a stream along N, of zeros (v2) or zeros minus 1 (v1) |
//! | `scales` | `[ceil(K / g), N]` f16 | |
//! | `g_idx` | `[K]` i32 | the group of each input |
//!
//! `W[n, k] = scales[g_idx[k], n] · (code - zero)`. With act-order `g_idx` is in no order, and the rows of `qweight`
//! stay in the order of the inputs.

use rayon::prelude::*;

use super::{Table, by_output};
use crate::codes::{PackedCodes, get, put};
use crate::error::{Error, Result};
use crate::linear::QuantizedLinear;
use crate::shape::{Bits, GroupSize, Groups, LinearShape};

/// The tensors of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct GptqTensors {
    /// `[K · b / 32, N]`.
    pub qweight: Table<u32>,
    /// `[ceil(K / g), N · b / 32]`.
    pub qzeros: Table<u32>,
    /// `[ceil(K / g), N]`.
    pub scales: Table<f32>,
    /// `[K]`; without it groups are in order.
    pub g_idx: Option<Vec<i32>>,
}

/// How zeros are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredZeros {
    /// Minus 1: version 1, `checkpoint_format` "gptq".
    MinusOne,
    /// As they are: version 2, `checkpoint_format` "gptq_v2".
    Plain,
}

/// What a zero of version 1 means whose stored bits are all ones: readers disagree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AllOnes {
    /// It is refused, because a wrong guess ruins the group.
    #[default]
    Refused,
    /// 2^b: 1 is added without a limit, as in AutoGPTQ's first kernels and exllama.
    Carries,
    /// 0: 1 is added in b bits, as in GPTQModel.
    Wraps,
}

/// What the tensors do not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptqLayout {
    /// Bits of a code.
    pub bits: Bits,
    /// Inputs of a group.
    pub group: GroupSize,
    /// How zeros are stored.
    pub zeros: StoredZeros,
    /// What a stored zero of all ones means in version 1.
    pub all_ones: AllOnes,
}

/// Reads a layer.
///
/// # Errors
/// [`Error::Size`], [`Error::Tensor`], [`Error::Format`], [`Error::Elements`], [`Error::Value`] and
/// [`Error::NonFinite`] for tensors that do not fit each other or the layout, and for a `g_idx` of zeros in a layer of
/// several groups: some readers take it for no index.
pub fn unpack(tensors: &GptqTensors, layout: &GptqLayout) -> Result<QuantizedLinear> {
    let bits = layout.bits;
    let shape = shape(&tensors.qweight, bits)?;
    let groups = groups(tensors.g_idx.as_deref(), shape, layout.group)?;
    let (count, outputs) = (groups.count(), shape.outputs());
    let of = || format!("{shape} with {bits} and groups of {}", groups.size());
    tensors.scales.check("scales", count, outputs, of)?;
    tensors.qzeros.check("qzeros", count, stream_words(bits, outputs)?, of)?;
    let mut zeros = vec![0; outputs * count];
    for output in 0..outputs {
        for group in 0..count {
            zeros[output * count + group] = zero(stored_zero(&tensors.qzeros, bits, group, output), layout, output)?;
        }
    }
    // A column of qweight is a row of codes.
    let row_words = tensors.qweight.rows();
    let mut words = vec![0; row_words * outputs];
    words.par_chunks_exact_mut(row_words).enumerate().for_each(|(output, row)| {
        row.iter_mut().enumerate().for_each(|(word, to)| *to = tensors.qweight.at(word, output));
    });
    QuantizedLinear::new(PackedCodes::new(bits, shape, words)?, groups, by_output(&tensors.scales), zeros)
}

/// Writes a layer.
///
/// # Errors
/// [`Error::Format`] for outputs or inputs whose codes fill no whole words, for zeros that the version cannot say, and
/// for several groups of which the first has all inputs.
pub fn pack(linear: &QuantizedLinear, zeros: StoredZeros) -> Result<GptqTensors> {
    let (bits, shape, groups) = (linear.bits(), linear.shape(), linear.groups());
    let (outputs, count) = (shape.outputs(), groups.count());
    let row_words = stream_words(bits, shape.inputs())?;
    let zero_words = stream_words(bits, outputs)?;
    if is_index_of_zeros(groups) {
        let (what, hint) = (format!("{count} groups of which the first has all inputs"), "use one group (a whole row)");
        return Err(Error::Format { format: "GPTQ", what, hint });
    }
    let codes = linear.codes();
    let mut qweight = vec![0; row_words * outputs];
    qweight.par_chunks_exact_mut(outputs).enumerate().for_each(|(word, row)| {
        row.iter_mut().enumerate().for_each(|(output, to)| *to = codes.row(output)[word]);
    });
    let mut qzeros = vec![0; zero_words * count];
    let mut scales = vec![0.0; outputs * count];
    for output in 0..outputs {
        for group in 0..count {
            let at = output * count + group;
            let stored = store_zero(linear.zeros()[at], bits, zeros)?;
            put(&mut qzeros[group * zero_words..][..zero_words], bits, output, stored);
            scales[group * outputs + output] = linear.scales()[at];
        }
    }
    Ok(GptqTensors {
        qweight: Table::new(row_words, outputs, qweight)?,
        qzeros: Table::new(count, zero_words, qzeros)?,
        scales: Table::new(count, outputs, scales)?,
        g_idx: Some((0..shape.inputs()).map(|input| groups.of(input) as i32).collect()),
    })
}

/// How the zeros of a symmetric layer are stored, by what they are: all 2^(b - 1) - 1 in version 1, all 2^(b - 1) in
/// version 2. `None` where they are neither, so that the configuration decides.
///
/// Some checkpoints say "gptq" and hold zeros of version 2. A layer that is symmetric shows it.
pub fn stored_zeros_of_symmetric(qzeros: &Table<u32>, bits: Bits) -> Option<StoredZeros> {
    if qzeros.values().is_empty() {
        return None;
    }
    let per_row = qzeros.columns() * 32 / bits.count() as usize;
    let all = |wanted: u32| {
        let of_row = |row| (0..per_row).all(|at| stored_zero(qzeros, bits, row, at) == wanted);
        (0..qzeros.rows()).all(of_row)
    };
    if all(bits.middle() - 1) {
        Some(StoredZeros::MinusOne)
    } else if all(bits.middle()) {
        Some(StoredZeros::Plain)
    } else {
        None
    }
}

/// N and K by the shape of `qweight`.
fn shape(qweight: &Table<u32>, bits: Bits) -> Result<LinearShape> {
    // Without columns there may be any number of rows.
    let words = qweight.rows() as u64;
    if !words.saturating_mul(32).is_multiple_of(bits.count().into()) {
        let reason = format!("its {words} rows are no whole number of codes of {bits}; 3 bits need a multiple of 3");
        return Err(Error::Tensor { name: "qweight".into(), reason });
    }
    let inputs = words.saturating_mul(32) / u64::from(bits.count());
    LinearShape::new(qweight.columns(), usize::try_from(inputs).unwrap_or(usize::MAX))
}

/// The words of a stream that must end with a word.
fn stream_words(bits: Bits, codes: usize) -> Result<usize> {
    if (codes * bits.count() as usize).is_multiple_of(32) {
        return Ok(bits.words(codes));
    }
    let what = format!("{codes} codes of {bits} in whole words");
    let hint = "outputs and inputs must be multiples of 32 / bits, at 3 bits of 32; leave this layer as it is";
    Err(Error::Format { format: "GPTQ", what, hint })
}

fn groups(g_idx: Option<&[i32]>, shape: LinearShape, size: GroupSize) -> Result<Groups> {
    let Some(g_idx) = g_idx else { return Ok(Groups::in_order(shape, size)) };
    let count = Groups::in_order(shape, size).count();
    let index = g_idx.iter().enumerate().map(|(index, &group)| {
        u32::try_from(group).map_err(|_| Error::Value {
            what: "g_idx of input",
            index,
            given: group.to_string(),
            allowed: format!("0 to {}", count - 1),
        })
    });
    let groups = Groups::indexed(shape, size, index.collect::<Result<_>>()?)?;
    if is_index_of_zeros(&groups) {
        let reason = format!(
            "it is 0 for every input of {count} groups; without act-order (desc_act) leave it out, with act-order \
             quantise the layer again"
        );
        return Err(Error::Tensor { name: "g_idx".into(), reason });
    }
    Ok(groups)
}

/// Whether an index is kept and puts all inputs into the first of several groups. Readers disagree about it: exllama
/// takes it for no index.
fn is_index_of_zeros(groups: &Groups) -> bool {
    groups.index().is_some_and(|index| index.iter().all(|&group| group == 0))
}

fn stored_zero(qzeros: &Table<u32>, bits: Bits, group: usize, output: usize) -> u32 {
    get(&qzeros.values()[group * qzeros.columns()..][..qzeros.columns()], bits, output)
}

fn zero(stored: u32, layout: &GptqLayout, output: usize) -> Result<u16> {
    let zero = match (layout.zeros, layout.all_ones) {
        (StoredZeros::Plain, _) => stored,
        (StoredZeros::MinusOne, _) if stored < layout.bits.largest() => stored + 1,
        (StoredZeros::MinusOne, AllOnes::Carries) => stored + 1,
        (StoredZeros::MinusOne, AllOnes::Wraps) => 0,
        (StoredZeros::MinusOne, AllOnes::Refused) => {
            return Err(Error::Value {
                what: "the stored zero of output",
                index: output,
                given: format!("{stored}, all ones"),
                allowed: "smaller ones: readers of version 1 take all ones as 2^b or as 0; say which (AllOnes)".into(),
            });
        }
    };
    // At most 2^8.
    Ok(zero as u16)
}

fn store_zero(zero: u16, bits: Bits, zeros: StoredZeros) -> Result<u32> {
    let zero = u32::from(zero);
    let stored = match zeros {
        StoredZeros::Plain => Some(zero).filter(|&zero| zero <= bits.largest()),
        // What would be stored for 0 and for 2^b is all ones, which readers disagree on.
        StoredZeros::MinusOne => zero.checked_sub(1).filter(|&stored| stored < bits.largest()),
    };
    stored.ok_or_else(|| match zeros {
        StoredZeros::Plain => Error::Format {
            format: "GPTQ v2",
            what: format!("a zero of {zero} at {bits}"),
            hint: "such zeros come from version 1 alone; quantise the layer again",
        },
        StoredZeros::MinusOne => {
            Error::Format { format: "GPTQ v1", what: format!("a zero of {zero} at {bits}"), hint: "write version 2" }
        }
    })
}
