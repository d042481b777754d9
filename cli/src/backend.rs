//! Which backend a command runs on.

use anyhow::{Result, bail};
use clap::ValueEnum;
use kvpack::cpu::Cpu;

use crate::adapters;

/// Options that choose the backend.
#[derive(clap::Args)]
pub struct BackendArgs {
    /// Run on the CPU or through wgpu [default: wgpu where there is an adapter, otherwise the CPU].
    #[arg(long, value_enum, value_name = "cpu|wgpu", hide_possible_values = true)]
    backend: Option<BackendName>,
    /// Part of the adapter's name; takes precedence over WGPU_ADAPTER_NAME.
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
    /// Force the kernels to those of a less capable device [default: the best that the adapter has].
    #[arg(long, value_enum)]
    path: Option<PathName>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendName {
    Cpu,
    Wgpu,
}

/// What the kernels may use of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PathName {
    /// What every WebGPU device has.
    Floor,
    /// And 16-bit floats.
    F16,
    /// And subgroup operations.
    Subgroups,
}

/// The backend chosen.
pub enum Chosen {
    /// The CPU.
    Cpu(Cpu),
}

impl BackendArgs {
    /// Opens the backend that the options ask for, and says on standard error what was chosen where that is no
    /// matter of course.
    ///
    /// # Errors
    /// When the options contradict each other or ask for what is not there.
    pub fn open(&self) -> Result<Chosen> {
        if self.backend == Some(BackendName::Cpu) {
            return self.open_cpu();
        }
        match adapters::choose(self.adapter.as_deref())? {
            Some(_) => bail!("the wgpu backend is not there yet; use --backend cpu"),
            None if self.backend == Some(BackendName::Wgpu) || self.path.is_some() => bail!(
                "this machine has no GPU adapter (see `kvpack list`); install a Vulkan driver (on Debian or Ubuntu: \
                 mesa-vulkan-drivers) or use --backend cpu"
            ),
            None => {
                eprintln!("This machine has no GPU adapter: running on the CPU backend.");
                Ok(Chosen::Cpu(Cpu::new()))
            }
        }
    }

    fn open_cpu(&self) -> Result<Chosen> {
        for (given, option) in [(self.adapter.is_some(), "--adapter"), (self.path.is_some(), "--path")] {
            if given {
                bail!("{option} chooses among GPUs and means nothing with --backend cpu; leave one of the two out");
            }
        }
        Ok(Chosen::Cpu(Cpu::new()))
    }
}
