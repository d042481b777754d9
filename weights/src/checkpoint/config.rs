//! What configurations say about quantised layers.

use std::path::Path;

use serde_json::Value;

use super::files::read_json;
use crate::error::{Error, Result};
use crate::format::gptq::StoredZeros;
use crate::shape::{Bits, GroupSize};

/// Bytes of the largest JSON file: the index of a large model has a few MB.
const MOST_JSON: u64 = 64 << 20;

/// The keys of a configuration that name rotations of activations: those of GPTQModel and compressed-tensors, and two
/// of auto-round.
const ROTATIONS: [&str; 4] = ["rotation", "transform_config", "rotation_config", "spinquant_config"];

/// Those that auto-round also writes into `config.json` itself.
const ROTATIONS_OF_MODEL: [&str; 2] = ["rotation_config", "spinquant_config"];

/// The format of a checkpoint's quantised layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// GPTQ.
    Gptq {
        /// Bits of a code.
        bits: Bits,
        /// Inputs of a group.
        group: GroupSize,
        /// How zeros are stored, unless a symmetric layer shows something else.
        zeros: StoredZeros,
        /// True if all zeros are 2^(b - 1).
        symmetric: bool,
        /// True if groups follow the order of activations (`desc_act`).
        act_order: bool,
    },
    /// AutoAWQ; 4 bits.
    Awq {
        /// Inputs of a group.
        group: GroupSize,
        /// The layout.
        version: AwqVersion,
    },
    /// compressed-tensors `pack-quantized`.
    CompressedTensors {
        /// Bits of a code.
        bits: Bits,
        /// Inputs of a group.
        group: GroupSize,
        /// True if there are no zero points.
        symmetric: bool,
        /// True if groups follow the order of activations (`actorder` "group").
        act_order: bool,
    },
}

/// Layouts of AutoAWQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AwqVersion {
    /// [`awq_gemm`](crate::format::awq_gemm).
    Gemm,
    /// [`awq_gemv`](crate::format::awq_gemv).
    Gemv,
    /// [`awq_gemv_fast`](crate::format::awq_gemv_fast).
    GemvFast,
}

/// The configuration in a folder.
pub fn of_folder(folder: &Path) -> Result<Scheme> {
    let of_file = |name: &str| json(&folder.join(name));
    let model = of_file("config.json")?.unwrap_or_default();
    check_unrotated(&model, &ROTATIONS_OF_MODEL)?;
    let in_model = Some(&model["quantization_config"]).filter(|found| !found.is_null()).cloned();
    let in_gptq = of_file("quantize_config.json")?;
    // Where both are there, either may name a rotation.
    check_unrotated(in_gptq.as_ref().unwrap_or(&Value::Null), &ROTATIONS)?;
    let configuration = match (in_model, in_gptq) {
        (Some(mut model), Some(gptq)) => {
            // Some programs write the version of the format in one of them only.
            if model["checkpoint_format"].is_null() && !gptq["checkpoint_format"].is_null() && model.is_object() {
                model["checkpoint_format"] = gptq["checkpoint_format"].clone();
            }
            Some(model)
        }
        (found, other) => found.or(other),
    };
    let configuration = match configuration {
        Some(found) => found,
        None => of_file("quant_config.json")?.ok_or_else(|| Error::Config {
            what: folder.display().to_string(),
            reason: "it has no configuration of quantised weights: neither 'quantization_config' in config.json, nor \
                     quantize_config.json, nor quant_config.json"
                .into(),
        })?,
    };
    Scheme::parse(&configuration)
}

/// A JSON file; `None` where there is none.
pub fn json(path: &Path) -> Result<Option<Value>> {
    read_json(path, MOST_JSON)
}

impl Scheme {
    /// Reads a configuration: the content of `quantize_config.json` or `quant_config.json`, or the value of
    /// `quantization_config` in `config.json`.
    ///
    /// # Errors
    /// [`Error::Config`] for a method or a parameter that is missing or not supported, and for rotated activations;
    /// [`Error::Bits`] for a width without a format.
    pub fn parse(configuration: &Value) -> Result<Self> {
        check_unrotated(configuration, &ROTATIONS)?;
        let method = match text(configuration, "quant_method")? {
            Some(method) => method,
            // AutoGPTQ's files and AutoAWQ's older ones do not name it.
            None if !configuration["w_bit"].is_null() => "awq".into(),
            None if !configuration["bits"].is_null() => "gptq".into(),
            None => return Err(wrong("quant_method", "it is missing; known are gptq, awq and compressed-tensors")),
        };
        let packing = text(configuration, "packing_format")?;
        match (method.as_str(), packing.as_deref()) {
            ("gptq", _) | ("auto-round" | "intel/auto-round", Some("auto_round:auto_gptq")) => {
                Self::gptq(configuration)
            }
            ("awq", _) | ("auto-round" | "intel/auto-round", Some("auto_round:auto_awq")) => Self::awq(configuration),
            ("auto-round" | "intel/auto-round", packing) => {
                let packing = packing.unwrap_or("missing");
                let reason = format!("it is {packing}; known are auto_round:auto_gptq and auto_round:auto_awq");
                Err(wrong("packing_format", reason))
            }
            ("compressed-tensors", _) => Self::compressed_tensors(configuration),
            (other, _) => {
                let reason = format!("it is '{other}'; known are gptq, awq, compressed-tensors and auto-round");
                Err(wrong("quant_method", reason))
            }
        }
    }

    fn gptq(configuration: &Value) -> Result<Self> {
        let format = text(configuration, "checkpoint_format")?;
        let zeros = match format.as_deref() {
            None | Some("gptq") => StoredZeros::MinusOne,
            Some("gptq_v2") => StoredZeros::Plain,
            Some(other) => {
                let reason =
                    format!("it is '{other}'; known are gptq and gptq_v2. Convert the checkpoint to one of them");
                return Err(wrong("checkpoint_format", reason));
            }
        };
        if flag(configuration, "is_marlin_format")?.unwrap_or(false) {
            return Err(wrong("is_marlin_format", "Marlin's layout is not supported; convert the checkpoint to gptq"));
        }
        Ok(Self::Gptq {
            bits: bits(configuration, "bits")?,
            group: group(configuration, "group_size")?,
            zeros,
            symmetric: flag(configuration, "sym")?.unwrap_or(true),
            act_order: flag(configuration, "desc_act")?.unwrap_or(false),
        })
    }

    fn awq(configuration: &Value) -> Result<Self> {
        let key = |new, old| if configuration[new].is_null() { old } else { new };
        let found = bits(configuration, key("bits", "w_bit"))?;
        if found != Bits::Four {
            return Err(wrong("bits", format!("{found}: AWQ's layouts have 4")));
        }
        let version = text(configuration, "version")?.unwrap_or_else(|| "gemm".into()).to_lowercase();
        let version = match version.as_str() {
            "gemm" => AwqVersion::Gemm,
            "gemv" => AwqVersion::Gemv,
            "gemv_fast" => AwqVersion::GemvFast,
            other => {
                let reason = format!("it is '{other}'; known are gemm, gemv and gemv_fast");
                return Err(wrong("version", reason));
            }
        };
        Ok(Self::Awq { group: group(configuration, key("group_size", "q_group_size"))?, version })
    }

    fn compressed_tensors(configuration: &Value) -> Result<Self> {
        let groups = configuration["config_groups"].as_object().filter(|groups| !groups.is_empty());
        let groups = groups.ok_or_else(|| wrong("config_groups", "it must be an object with one entry or more"))?;
        let default = text(configuration, "format")?;
        let mut found: Option<Self> = None;
        for (name, of_group) in groups {
            let format = text(of_group, "format")?.or_else(|| default.clone());
            if format.as_deref() != Some("pack-quantized") {
                let format = format.unwrap_or_else(|| "missing".into());
                return Err(wrong("format", format!("it is {format}; pack-quantized can be read")));
            }
            let scheme = Self::compressed_group(&of_group["weights"])?;
            if found.is_some_and(|other| other != scheme) {
                let reason = format!("'{name}' differs from another group; all must have the same weights");
                return Err(wrong("config_groups", reason));
            }
            found = Some(scheme);
        }
        found.ok_or_else(|| wrong("config_groups", "it is empty"))
    }

    fn compressed_group(weights: &Value) -> Result<Self> {
        let kind = text(weights, "type")?.unwrap_or_else(|| "int".into());
        if kind != "int" {
            return Err(wrong("type", format!("it is '{kind}'; weights of type int can be read")));
        }
        let strategy = match text(weights, "strategy")? {
            Some(strategy) => strategy,
            None if weights["group_size"].is_null() => "channel".into(),
            None => "group".into(),
        };
        let group = match strategy.as_str() {
            "group" => group(weights, "group_size")?,
            "channel" => GroupSize::Row,
            other => return Err(wrong("strategy", format!("it is '{other}'; group and channel can be read"))),
        };
        let symmetric = flag(weights, "symmetric")?.unwrap_or(true);
        let act_order = compressed_act_order(weights)?;
        Ok(Self::CompressedTensors { bits: bits(weights, "num_bits")?, group, symmetric, act_order })
    }
}

/// Whether groups follow the order of activations. "weight" is an order of the quantiser that changes no group.
fn compressed_act_order(weights: &Value) -> Result<bool> {
    if let Value::Bool(by_group) = weights["actorder"] {
        return Ok(by_group);
    }
    let order = text(weights, "actorder")?.map(|order| order.to_lowercase());
    match order.as_deref() {
        None | Some("weight" | "static") => Ok(false),
        Some("group" | "dynamic") => Ok(true),
        Some(other) => {
            let reason = format!("it is '{other}'; known are group, dynamic, weight, static, true and false");
            Err(wrong("actorder", reason))
        }
    }
}

/// Refuses weights that belong to rotated activations: as plain weights they give wrong outputs.
fn check_unrotated(configuration: &Value, keys: &[&str]) -> Result<()> {
    let is_set = |key: &&&str| match &configuration[**key] {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => !text.is_empty(),
        Value::Object(entries) => !entries.is_empty(),
        Value::Array(entries) => !entries.is_empty(),
        _ => true,
    };
    match keys.iter().find(is_set) {
        None => Ok(()),
        Some(key) => {
            let given = short(&configuration[*key]);
            let reason = format!(
                "it is {given}; weights that are multiplied with rotated activations cannot be read. Quantise without \
                 rotations"
            );
            Err(wrong(key, reason))
        }
    }
}

fn wrong(key: &str, reason: impl Into<String>) -> Error {
    Error::Config { what: format!("'{key}' of the configuration"), reason: reason.into() }
}

/// A text that may be missing.
fn text(of: &Value, key: &str) -> Result<Option<String>> {
    match &of[key] {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        other => Err(wrong(key, format!("it is {}; a text is needed", short(other)))),
    }
}

/// A flag that may be missing.
fn flag(of: &Value, key: &str) -> Result<Option<bool>> {
    match &of[key] {
        Value::Null => Ok(None),
        Value::Bool(flag) => Ok(Some(*flag)),
        other => Err(wrong(key, format!("it is {}; true or false is needed", short(other)))),
    }
}

fn bits(of: &Value, key: &str) -> Result<Bits> {
    let given =
        of[key].as_u64().ok_or_else(|| wrong(key, format!("it is {}; 2, 3, 4 or 8 is needed", short(&of[key]))))?;
    Bits::new(given)
}

fn group(of: &Value, key: &str) -> Result<GroupSize> {
    let given = of[key].as_i64();
    GroupSize::new(given.ok_or_else(|| wrong(key, format!("it is {}; -1 or a size is needed", short(&of[key]))))?)
}

/// A value for a message.
fn short(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() > 60 { text.chars().take(60).chain("…".chars()).collect() } else { text }
}
