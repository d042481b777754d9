//! The ops of TurboQuant.

mod published;

use anyhow::{Result, bail, ensure};
use kvpack::format::Codebook;
use kvpack::format::codebook::CoordinateDensity;
use published::{Matrix, quantize_mse, quantize_prod};

use super::Outputs;
use super::file::GoldenFile;

/// Most dimensions of a density that a file may ask for.
const MOST_DIMENSIONS: usize = 4096;

/// `turboquant.codebook`: Lloyd-Max codebooks at 1 to 4 bits.
pub fn codebook(file: &GoldenFile) -> Result<Vec<(&'static str, Outputs)>> {
    let dimension = file.number("d")? as usize;
    ensure!(
        (3..=MOST_DIMENSIONS).contains(&dimension),
        "d = {dimension}: from 3 to {MOST_DIMENSIONS} dimensions are served"
    );
    let density = match file.text("pdf")? {
        "N(0,1/d)" => CoordinateDensity::Gaussian(dimension),
        pdf if pdf.contains("(1-x^2)^((d-3)/2)") => CoordinateDensity::Sphere(dimension),
        other => bail!("no density '{other}'"),
    };
    let names = [
        ("centroids_b1", "boundaries_b1"),
        ("centroids_b2", "boundaries_b2"),
        ("centroids_b3", "boundaries_b3"),
        ("centroids_b4", "boundaries_b4"),
    ];
    let mut outputs = Outputs::new();
    for (bits, (centroids, boundaries)) in (1..).zip(names) {
        let codebook = Codebook::lloyd_max(bits, density);
        outputs.insert(centroids.into(), to_f64(codebook.centroids()));
        outputs.insert(boundaries.into(), to_f64(codebook.boundaries()));
    }
    Ok(vec![("Codebook::lloyd_max", outputs)])
}

/// `turboquant.mse`: algorithm 1 with the rotation and the levels of the file.
pub fn mse(file: &GoldenFile) -> Result<Vec<(&'static str, Outputs)>> {
    let [_, dimension] = file.input("x")?.axes()?;
    let rotation = file.input("rotation")?.f32()?;
    let rotation = Matrix::new(&rotation, dimension)?;
    let codebook = Codebook::from_centroids(file.input("centroids")?.f32()?);
    let mut outputs = Outputs::new();
    let mut add = |name: &str, values: Vec<f64>| outputs.entry(name.into()).or_default().extend(values);
    for row in file.input("x")?.f32()?.chunks_exact(dimension) {
        let quantized = quantize_mse(row, rotation, &codebook)?;
        add("indices", quantized.codes.iter().map(|&code| code.into()).collect());
        add("norms", vec![quantized.norm.into()]);
        add("recon", to_f64(&quantized.reconstruct(rotation, &codebook)?));
    }
    Ok(vec![("TurboQuant as published", outputs)])
}

/// `turboquant.prod`: algorithm 2 with the rotation, the levels and the projection of the file.
pub fn prod(file: &GoldenFile) -> Result<Vec<(&'static str, Outputs)>> {
    let [rows, dimension] = file.input("x")?.axes()?;
    let (rotation, projection) = (file.input("rotation")?.f32()?, file.input("S")?.f32()?);
    let (rotation, projection) = (Matrix::new(&rotation, dimension)?, Matrix::new(&projection, dimension)?);
    let codebook = Codebook::from_centroids(file.input("centroids")?.f32()?);
    let queries = file.input("q")?.f32()?;
    let mut outputs = Outputs::new();
    let mut products = vec![0.0; queries.len() / dimension * rows];
    for (i, row) in file.input("x")?.f32()?.chunks_exact(dimension).enumerate() {
        let quantized = quantize_prod(row, rotation, &codebook, projection)?;
        let near = quantized.reconstruct(rotation, &codebook, projection)?;
        for (query, products) in queries.chunks_exact(dimension).zip(products.chunks_exact_mut(rows)) {
            products[i] = query.iter().zip(&near).map(|(&q, &x)| f64::from(q) * f64::from(x)).sum();
        }
        let mut add = |name: &str, values: Vec<f64>| outputs.entry(name.into()).or_default().extend(values);
        add("indices", quantized.mse.codes.iter().map(|&code| code.into()).collect());
        add("norms", vec![quantized.mse.norm.into()]);
        add("recon_mse", to_f64(&quantized.mse.reconstruct(rotation, &codebook)?));
        add("gamma", vec![quantized.gamma.into()]);
        add("sign_bits", quantized.signs.iter().map(|&sign| u8::from(sign).into()).collect());
        add("recon", to_f64(&near));
    }
    outputs.insert("inner_product".into(), products);
    Ok(vec![("TurboQuant as published", outputs)])
}

fn to_f64(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x.into()).collect()
}
