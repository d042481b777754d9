//! The ops of quantised weights, by `kvpack-weights`.

use anyhow::{Context, Result, bail, ensure};
use kvpack_weights::format::awq_gemm::AwqTensors;
use kvpack_weights::format::compressed_tensors::CompressedTensors;
use kvpack_weights::format::gptq::{AllOnes, GptqLayout, GptqTensors, StoredZeros};
use kvpack_weights::format::{Table, awq_gemm, awq_gemv, compressed_tensors, gptq};
use kvpack_weights::quantize::{self, AwqOptions, Clip, GptqOptions, Grid, Hessian, Matrix, ScaleType, Symmetry};
use kvpack_weights::{Bits, GroupSize, QuantizedLinear};

use super::file::{Elements, GoldenFile};
use super::{Computed, doubles, named};

/// The most multiply-adds of a product: seconds, even without optimisation.
const MOST_WORK: usize = 1 << 30;

/// `gptq.unpack`: codes and weights of a GPTQ layer.
pub fn gptq_unpack(file: &GoldenFile) -> Result<Computed> {
    check_codes(file, "qweight")?;
    Ok(unpacked("gptq::unpack", &gptq_layer(file)?))
}

/// `awq.unpack`: codes and weights of an AWQ layer.
pub fn awq_unpack(file: &GoldenFile) -> Result<Computed> {
    check_codes(file, "qweight")?;
    let tensors = AwqTensors {
        qweight: words(file, "qweight")?,
        qzeros: words(file, "qzeros")?,
        scales: floats(file, "scales")?,
    };
    let group = group(file, "group_size")?;
    match file.text("version")? {
        "gemm" => Ok(unpacked("awq_gemm::unpack", &awq_gemm::unpack(&tensors, group)?)),
        "gemv" => Ok(unpacked("awq_gemv::unpack", &awq_gemv::unpack(&tensors, group)?)),
        other => bail!("unknown version of AWQ: {other}"),
    }
}

/// `compressed_tensors.unpack`: codes and weights of a `pack-quantized` layer.
pub fn compressed_tensors_unpack(file: &GoldenFile) -> Result<Computed> {
    check_codes(file, "weight_packed")?;
    let zeros = (!file.flag("symmetric")).then(|| words(file, "weight_zero_point")).transpose()?;
    let shape = integers(file, "weight_shape")?;
    let tensors = CompressedTensors {
        weight_packed: words(file, "weight_packed")?,
        weight_scale: floats(file, "weight_scale")?,
        weight_zero_point: zeros,
        weight_shape: <[i32; 2]>::try_from(shape).ok().context("'weight_shape' needs 2 elements")?.map(i64::from),
        weight_g_idx: None,
    };
    let linear = compressed_tensors::unpack(&tensors, bits(file)?, group(file, "group_size")?)?;
    Ok(unpacked("compressed_tensors::unpack", &linear))
}

/// `gptq.quantize`.
pub fn gptq_quantize(file: &GoldenFile) -> Result<Computed> {
    ensure!(!file.flag("actorder"), "files with act-order are not run");
    let ([outputs, inputs], [tokens, channels]) = (file.input("w")?.axes()?, file.input("x")?.axes()?);
    check_work([inputs, inputs, inputs.max(outputs).max(tokens)])?;
    let symmetry = if file.flag("sym") { Symmetry::Symmetric } else { Symmetry::Asymmetric };
    let grid = Grid { bits: bits(file)?, group: group(file, "groupsize")?, symmetry, scales: ScaleType::F32 };
    let options = GptqOptions { damping: file.number("percdamp")?, ..GptqOptions::new(grid) };
    let (w, x) = (file.input("w")?.f32()?, file.input("x")?.f32()?);
    let mut hessian = Hessian::new(inputs)?;
    hessian.add(Matrix::new(tokens, channels, &x)?)?;
    let linear = quantize::gptq(Matrix::new(outputs, inputs, &w)?, &hessian, &options)?.linear;
    let outputs = named([
        ("codes", doubles(&linear.codes().unpack())),
        ("scale", doubles(linear.scales())),
        ("zero", doubles(linear.zeros())),
        ("w_q", linear.dequantize::<f64>()),
    ]);
    Ok(vec![("quantize::gptq", outputs)])
}

/// `awq.scale`: the search for scales, and the quantised scaled weights.
pub fn awq_scale(file: &GoldenFile) -> Result<Computed> {
    let ([outputs, inputs], [tokens, channels]) = (file.input("w")?.axes()?, file.input("x")?.axes()?);
    check_work([inputs, outputs, tokens])?;
    let grid = Grid {
        bits: bits(file)?,
        group: group(file, "group")?,
        symmetry: Symmetry::Asymmetric,
        scales: ScaleType::F32,
    };
    let (w, x) = (file.input("w")?.f32()?, file.input("x")?.f32()?);
    let (w, x) = (Matrix::new(outputs, inputs, &w)?, Matrix::new(tokens, channels, &x)?);
    let found = quantize::awq(w, x, &AwqOptions { grid, clip: Clip::Never })?;
    let linear = &found.linear;
    let weights = linear.dequantize::<f64>().into_iter().enumerate();
    let outputs = named([
        ("best_index", vec![found.search.best as f64]),
        ("scales", doubles(&found.search.scales)),
        ("codes", doubles(&linear.codes().unpack())),
        ("q_scale", doubles(linear.scales())),
        ("q_zero", doubles(linear.zeros())),
        ("w_q", weights.map(|(at, weight)| weight / f64::from(found.search.scales[at % inputs])).collect()),
        ("loss", found.search.losses),
    ]);
    Ok(vec![("quantize::awq", outputs)])
}

/// `w4a16.matmul`: the product with packed weights, in f32 and f64.
pub fn w4a16_matmul(file: &GoldenFile) -> Result<Computed> {
    let linear = gptq_layer(file)?;
    let [rows, inputs] = file.input("x")?.axes()?;
    check_work([rows, inputs, linear.shape().outputs()])?;
    let x = file.input("x")?.f32()?;
    let in_f64: Vec<f64> = x.iter().map(|&x| x.into()).collect();
    Ok(vec![
        ("linear (f32)", named([("y", doubles(&linear.linear(&x)?))])),
        ("linear (f64)", named([("y", linear.linear(&in_f64)?)])),
    ])
}

/// Refuses products that would take minutes.
fn check_work(sizes: [usize; 3]) -> Result<()> {
    let work = sizes.into_iter().try_fold(1usize, |work, size| work.checked_mul(size));
    let is_short = work.is_some_and(|work| work <= MOST_WORK);
    ensure!(is_short, "a product of {sizes:?}; files with up to {MOST_WORK} multiply-adds are run");
    Ok(())
}

/// Refuses words whose codes are more than the file has outputs for.
fn check_codes(file: &GoldenFile, words: &str) -> Result<()> {
    let [rows, columns] = file.input(words)?.axes()?;
    let codes = rows.checked_mul(columns).and_then(|words| words.checked_mul(32));
    // A row may end within a word: its bits behind the last code are fewer than 32.
    let per_code = bits(file)?.count() as usize;
    file.check_asked("codes", codes.map(|bits| (bits / per_code).saturating_sub(rows * (32 / per_code))))
}

fn gptq_layer(file: &GoldenFile) -> Result<QuantizedLinear> {
    let zeros = match file.text("checkpoint_format")? {
        "gptq" => StoredZeros::MinusOne,
        "gptq_v2" => StoredZeros::Plain,
        other => bail!("unknown version of GPTQ: {other}"),
    };
    let tensors = GptqTensors {
        qweight: words(file, "qweight")?,
        qzeros: words(file, "qzeros")?,
        scales: floats(file, "scales")?,
        g_idx: Some(integers(file, "g_idx")?),
    };
    let group = group(file, "group_size")?;
    Ok(gptq::unpack(&tensors, &GptqLayout { bits: bits(file)?, group, zeros, all_ones: AllOnes::Refused })?)
}

fn unpacked(name: &'static str, linear: &QuantizedLinear) -> Computed {
    let weights = doubles(&linear.dequantize::<f32>());
    vec![(name, named([("codes", doubles(&linear.codes().unpack())), ("weights", weights)]))]
}

fn bits(file: &GoldenFile) -> Result<Bits> {
    Ok(Bits::new(file.count("bits")? as u64)?)
}

/// A group size; -1 is a whole row.
fn group(file: &GoldenFile, name: &str) -> Result<GroupSize> {
    let size = file.number(name)?;
    ensure!(size.fract() == 0.0, "'{name}' is {size}; -1 or a whole number is needed");
    Ok(GroupSize::new(size as i64)?)
}

fn integers(file: &GoldenFile, name: &str) -> Result<Vec<i32>> {
    match &file.input(name)?.elements {
        Elements::I32(x) => Ok(x.clone()),
        _ => bail!("'{name}' has other elements where integers of 32 bits are needed"),
    }
}

fn words(file: &GoldenFile, name: &str) -> Result<Table<u32>> {
    let [rows, columns] = file.input(name)?.axes()?;
    // Signed in the file; the bits are what counts.
    let words = integers(file, name)?.into_iter().map(i32::cast_unsigned).collect();
    Ok(Table::new(rows, columns, words)?)
}

fn floats(file: &GoldenFile, name: &str) -> Result<Table<f32>> {
    let [rows, columns] = file.input(name)?.axes()?;
    Ok(Table::new(rows, columns, file.input(name)?.f32()?)?)
}
