//! `kvpack list`: the adapters of this machine.

use anyhow::Result;

use crate::adapters::AdapterSummary;
use crate::outcome::Outcome;
use crate::print::{self, say};

/// Lists the GPU adapters with their drivers, features and limits.
#[derive(clap::Args)]
pub struct ListArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &ListArgs) -> Result<Outcome> {
    let adapters: Vec<AdapterSummary> =
        pollster::block_on(kvpack::wgpu::adapters())?.iter().map(AdapterSummary::new).collect();
    let threads = rayon::current_num_threads();
    if args.json {
        print::json(&serde_json::json!({ "adapters": adapters, "cpu": { "threads": threads } }))?;
        return Ok(Outcome::Passed);
    }
    for adapter in &adapters {
        print_adapter(adapter)?;
    }
    if adapters.is_empty() {
        say!("No GPU adapter. Install a driver (on Debian or Ubuntu: mesa-vulkan-drivers), or use the CPU backend.")?;
    }
    say!("CPU backend: always there, {threads} threads (--backend cpu)")?;
    Ok(Outcome::Passed)
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
