//! Every shader variant is valid and can be written for every graphics interface, on any machine.
#![cfg(feature = "wgpu")]

use std::collections::BTreeSet;

use kvpack::wgpu::{Variant, variants};
use naga::back::{hlsl, msl, spv};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};

fn parse(variant: &Variant) -> Result<(naga::Module, ModuleInfo), String> {
    let source = variant.source().map_err(|error| error.to_string())?;
    let numbered = || {
        let lines = source.wgsl.lines().enumerate().map(|(i, line)| format!("{:4} {line}\n", i + 1));
        lines.collect::<String>()
    };
    let module = naga::front::wgsl::parse_str(&source.wgsl)
        .map_err(|error| format!("{}\n{}", error.emit_to_string(&source.wgsl), numbered()))?;
    // Only what kernels may rely on: the floor, and the two features of the other paths.
    let allowed = Capabilities::SHADER_FLOAT16 | Capabilities::SUBGROUP;
    let info = Validator::new(ValidationFlags::all(), allowed)
        .validate(&module)
        .map_err(|error| format!("{}\n{}", error.emit_to_string(&source.wgsl), numbered()))?;
    Ok((module, info))
}

fn write_spirv(module: &naga::Module, info: &ModuleInfo) -> Result<(), String> {
    let options = spv::Options { lang_version: (1, 3), ..Default::default() };
    spv::write_vec(module, info, &options, None).map(drop).map_err(|error| error.to_string())
}

fn write_msl(module: &naga::Module, info: &ModuleInfo) -> Result<(), String> {
    let options = msl::Options { lang_version: (2, 4), fake_missing_bindings: true, ..Default::default() };
    let pipeline = msl::PipelineOptions::default();
    msl::write_string(module, info, &options, &pipeline).map(drop).map_err(|error| error.to_string())
}

fn write_hlsl(module: &naga::Module, info: &ModuleInfo) -> Result<(), String> {
    let options = hlsl::Options { shader_model: hlsl::ShaderModel::V6_4, ..Default::default() };
    let pipeline = hlsl::PipelineOptions::default();
    let mut text = String::new();
    hlsl::Writer::new(&mut text, &options, &pipeline)
        .write(module, info, None)
        .map(drop)
        .map_err(|error| error.to_string())
}

/// The kernel's source is the same for all its entry points, so each text is translated once.
#[test]
fn every_variant_is_valid_and_translates() {
    let mut seen = BTreeSet::new();
    for variant in variants() {
        if !seen.insert(variant.source().unwrap().wgsl) {
            continue;
        }
        let translated = parse(&variant).and_then(|(module, info)| {
            assert!(module.entry_points.iter().any(|entry| entry.name == variant.entry_point()), "{}", variant.label());
            write_spirv(&module, &info)?;
            write_msl(&module, &info)?;
            write_hlsl(&module, &info)
        });
        if let Err(reason) = translated {
            panic!("{}: {reason}", variant.label());
        }
    }
    assert!(seen.len() > 100, "{}", seen.len());
}

/// The floor binds at most 8 storage buffers.
#[test]
fn every_variant_binds_few_buffers() {
    for variant in variants() {
        let source = variant.source().unwrap();
        assert!(source.bindings.len() <= 8, "{} binds {}", variant.label(), source.bindings.len());
        let declared = source.wgsl.matches("var<storage").count();
        assert_eq!(source.bindings.len(), declared, "{}", variant.label());
    }
}
