//! `kvpack list`: the adapters of this machine, and the recipes with what serves them here.

use anyhow::Result;
use kvpack::backend::QueryPrecision;
use kvpack::cache::{EVICTIONS, METHODS, ModelRecipe};
use kvpack::{AttentionShape, Backend, Error};

use crate::adapters::AdapterSummary;
use crate::backend::{BackendArgs, Chosen};
use crate::outcome::Outcome;
use crate::print::{self, say};

/// List the GPUs of this machine, and every recipe with the arithmetic that serves it here.
///
/// Adapters come with their driver, features and limits. Recipes come with their bits per element, their source, and
/// the arithmetic by which the backend multiplies keys and values, so that a slow path is never silent.
#[derive(clap::Args)]
pub struct ListArgs {
    #[command(flatten)]
    backend: BackendArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &ListArgs) -> Result<Outcome> {
    let adapters: Vec<AdapterSummary> =
        pollster::block_on(kvpack::wgpu::adapters())?.iter().map(AdapterSummary::new).collect();
    let threads = rayon::current_num_threads();
    let backend = args.backend.open()?;
    let (name, recipes) = match &backend {
        Chosen::Cpu(backend) => recipes(backend)?,
        Chosen::Wgpu(backend) => recipes(backend)?,
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => recipes(backend)?,
    };
    if args.json {
        let cpu = serde_json::json!({ "threads": threads });
        let report = serde_json::json!({
            "adapters": adapters, "cpu": cpu, "backend": name, "recipes": recipes, "evictions": evictions(),
        });
        print::json(&report)?;
        return Ok(Outcome::Passed);
    }
    for adapter in &adapters {
        print_adapter(adapter)?;
    }
    if adapters.is_empty() {
        say!("No GPU adapter. Install a driver (on Debian or Ubuntu: mesa-vulkan-drivers), or use the CPU backend.")?;
    }
    say!("CPU backend: always there, {threads} threads (--backend cpu)")?;
    print_recipes(&name, &recipes)?;
    print_evictions()?;
    Ok(Outcome::Passed)
}

/// What recipes may begin with.
fn evictions() -> Vec<serde_json::Value> {
    let row = |eviction: &kvpack::cache::Eviction| {
        let recipe = format!("{}:{}/", eviction.name, eviction.arguments);
        serde_json::json!({ "recipe": recipe, "keeps": eviction.keeps, "source": eviction.source })
    };
    EVICTIONS.iter().map(row).collect()
}

fn print_evictions() -> Result<()> {
    say!("\nBefore a recipe, as in lookm:0.2/saw-int4: which tokens of a prompt stay")?;
    let mut table = print::results(&["recipe", "keeps", "from"], 3);
    for eviction in EVICTIONS {
        table.add_row([
            format!("{}:{}/", eviction.name, eviction.arguments),
            eviction.keeps.into(),
            eviction.source.into(),
        ]);
    }
    Ok(say!("{table}")?)
}

/// Query and KV heads, and channels of a head, at which recipes are listed: those of an 8B model of today.
const SHAPE: (usize, usize, usize) = (32, 8, 128);

/// A recipe and what serves it.
#[derive(serde::Serialize)]
struct RecipeRow {
    /// The recipe, as every command takes it.
    recipe: String,
    /// Bits per element of a packed page.
    bits: f64,
    /// How keys and values are stored.
    stores: &'static str,
    /// Where it comes from.
    source: &'static str,
    /// The arithmetic that multiplies keys and values with a query of 16 bits, or why there is none.
    arithmetic: String,
    /// The same with a query of 8 bits.
    arithmetic_int8: String,
}

/// The backend's name, and every recipe with what serves it there.
fn recipes<B: Backend>(backend: &B) -> Result<(String, Vec<RecipeRow>)> {
    let (query_heads, kv_heads, head_dim) = SHAPE;
    let shape = AttentionShape::new(query_heads, kv_heads, head_dim)?;
    let row = |recipe: ModelRecipe| {
        let text = recipe.to_string();
        let method = METHODS.iter().find(|method| text.split(':').next() == Some(method.name));
        let format = recipe.layer(0, &shape).packed().format;
        let arithmetic = |query| match backend.arithmetic(&shape, &format, query) {
            Ok(arithmetic) => Ok(arithmetic.to_string()),
            Err(reason @ (Error::Unsupported { .. } | Error::Format { .. } | Error::Limit { .. })) => {
                Ok(format!("not served: {reason}"))
            }
            Err(error) => Err(error),
        };
        Ok(RecipeRow {
            recipe: text,
            bits: format.bits_per_element(&shape),
            stores: method.map_or("", |method| method.stores),
            source: method.map_or("", |method| method.source),
            arithmetic: arithmetic(QueryPrecision::Int16)?,
            arithmetic_int8: arithmetic(QueryPrecision::Int8)?,
        })
    };
    Ok((backend.name(), ModelRecipe::all().into_iter().map(row).collect::<Result<_>>()?))
}

fn print_recipes(name: &str, rows: &[RecipeRow]) -> Result<()> {
    let (query_heads, kv_heads, head_dim) = SHAPE;
    say!("\nRecipes on {name}, {query_heads} query heads over {kv_heads} KV heads × {head_dim}")?;
    let mut table = print::results(&["recipe", "bits", "multiplied as (keys, values)", "from"], 4);
    for row in rows {
        let arithmetic = match row.arithmetic == row.arithmetic_int8 {
            true => row.arithmetic.clone(),
            false => format!("{}; 8-bit query: {}", row.arithmetic, row.arithmetic_int8),
        };
        table.add_row([row.recipe.clone(), format!("{:.2}", row.bits), arithmetic, row.source.into()]);
    }
    say!("{table}")?;
    Ok(say!("Formats and other numbers of heads: `kvpack check --matrix`.")?)
}

fn print_adapter(adapter: &AdapterSummary) -> Result<()> {
    say!("{} ({}, {})", adapter.name, adapter.api, adapter.kind)?;
    let mut table = print::facts();
    let yes = |there| if there { "yes" } else { "no" };
    let features = &adapter.features;
    let limits = &adapter.limits;
    table.add_row(["driver", &adapter.driver]);
    table.add_row(["f16 in shaders", yes(features.f16)]);
    let subgroups = match adapter.subgroup_size {
        None => "no".into(),
        Some([least, most]) if least == most => format!("of {most}"),
        Some([least, most]) => format!("of {least} to {most}"),
    };
    table.add_row(["subgroups", &subgroups]);
    let matrices = if adapter.matrices.is_empty() { "no".into() } else { adapter.matrices.join(", ") };
    table.add_row(["cooperative matrices", &matrices]);
    table.add_row(["GPU timestamps", yes(features.timestamps)]);
    let storage = format!("{} × {}", limits.storage_buffers, print::bytes(limits.storage_binding_bytes));
    table.add_row(["storage bindings", &storage]);
    table.add_row(["largest buffer", &print::bytes(limits.buffer_bytes)]);
    let workgroup =
        format!("{} invocations, {}", limits.workgroup_invocations, print::bytes(limits.workgroup_bytes.into()));
    table.add_row(["workgroup", &workgroup]);
    Ok(say!("{table}\n")?)
}
