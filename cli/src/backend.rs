//! Which backend a command runs on.

use std::sync::Arc;

use anyhow::{Result, bail};
use clap::ValueEnum;
use kvpack::cpu::Cpu;
#[cfg(feature = "cuda")]
use kvpack::cuda::{Cuda, KernelCache};
use kvpack::wgpu::{Checks, Kernels, Path, Requirements, Wgpu, adapters, choose_adapter, open_device};
use pollster::block_on;

use crate::compiled;
use crate::print::note;

/// Options that choose the backend.
#[derive(clap::Args)]
pub struct BackendArgs {
    /// Run on the CPU, through wgpu or through CUDA [default: wgpu where there is a GPU, otherwise the CPU].
    #[arg(long, value_enum, value_name = "cpu|wgpu|cuda", hide_possible_values = true)]
    backend: Option<BackendName>,
    /// Part of the adapter's name; takes precedence over WGPU_ADAPTER_NAME.
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
    /// Use only kernels for devices with these capabilities [default: the best that the adapter has].
    #[arg(long, value_enum)]
    path: Option<PathName>,
    /// Which run-time checks wgpu adds to shaders [default: trusted].
    #[arg(long, value_enum)]
    checks: Option<ChecksName>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendName {
    Cpu,
    Wgpu,
    #[cfg(feature = "cuda")]
    Cuda,
}

/// What the kernels may use of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PathName {
    /// What every WebGPU device has
    Floor,
    /// Floor plus 16-bit floats
    F16,
    /// F16 plus subgroup operations
    Subgroups,
    /// Subgroups plus cooperative matrices
    Matrices,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ChecksName {
    /// No checks: the kernels are shown to stay in bounds
    Trusted,
    /// Indices are clamped
    Indices,
    /// All checks that wgpu can insert: slower
    Safe,
}

/// The backend chosen.
pub enum Chosen {
    /// The CPU.
    Cpu(Cpu),
    /// A GPU.
    Wgpu(Wgpu),
    /// An NVIDIA GPU, the first one.
    #[cfg(feature = "cuda")]
    Cuda(Cuda),
}

impl Chosen {
    /// The driver and its version.
    pub fn driver(&self) -> String {
        match self {
            Self::Cpu(_) => "none".into(),
            Self::Wgpu(backend) => {
                let info = backend.device().adapter_info();
                format!("{} {}", info.driver, info.driver_info).trim().into()
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => nvidia_driver(),
        }
    }
}

/// Of NVIDIA's driver CUDA itself only tells the version of its interface.
#[cfg(feature = "cuda")]
pub fn nvidia_driver() -> String {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.split_whitespace().find(is_version).map_or("unknown".into(), |version| format!("NVIDIA {version}"))
}

impl BackendArgs {
    /// Opens the backend that the options ask for. Without a GPU that is the CPU backend, which computes the same as a
    /// software driver on the same processor, only faster; standard error says so.
    ///
    /// # Errors
    /// When the options contradict each other or ask for what is not there.
    pub fn open(&self) -> Result<Chosen> {
        match self.backend {
            Some(BackendName::Cpu) => {
                self.refuse_gpu_options("cpu")?;
                Ok(Chosen::Cpu(Cpu::new()))
            }
            #[cfg(feature = "cuda")]
            Some(BackendName::Cuda) => {
                self.refuse_gpu_options("cuda")?;
                Ok(Chosen::Cuda(Cuda::open(0, KernelCache::of_user())?))
            }
            Some(BackendName::Wgpu) => Ok(Chosen::Wgpu(self.open_wgpu()?)),
            None if self.names_an_adapter() => Ok(Chosen::Wgpu(self.open_wgpu()?)),
            None => {
                let adapters = block_on(adapters())?;
                let is_software = |adapter: &wgpu::Adapter| adapter.get_info().device_type == wgpu::DeviceType::Cpu;
                if !adapters.iter().all(is_software) {
                    return Ok(Chosen::Wgpu(self.open_wgpu()?));
                }
                match adapters.first() {
                    None => note!("This machine has no GPU adapter: running on the CPU backend."),
                    Some(adapter) => note!(
                        "This machine has no GPU: running on the CPU backend, which is faster than the software driver \
                         {} (--backend wgpu).",
                        adapter.get_info().name
                    ),
                }
                Ok(Chosen::Cpu(Cpu::new()))
            }
        }
    }

    /// Whether an option or the environment asks for an adapter, be it a software one.
    fn names_an_adapter(&self) -> bool {
        let by_name = std::env::var_os("WGPU_ADAPTER_NAME").is_some_and(|name| !name.is_empty());
        by_name || self.adapter.is_some() || self.path.is_some() || self.checks.is_some()
    }

    /// Which of the options change what is measured.
    pub fn not_default(&self) -> Vec<String> {
        let checks = self.checks.filter(|&checks| Checks::from(checks) != Checks::default());
        let checks = checks.map(|checks| format!("checks {}", format!("{checks:?}").to_lowercase()));
        let path = self.path.map(|path| format!("path {}", Path::from(path)));
        checks.into_iter().chain(path).collect()
    }

    /// Refuses a backend that `what` does not run on.
    ///
    /// # Errors
    /// When another than CUDA's is asked for.
    #[cfg(feature = "cuda")]
    pub fn refuse_other_than_cuda(&self, what: &str) -> Result<()> {
        if self.names_an_adapter_option() || matches!(self.backend, Some(BackendName::Cpu | BackendName::Wgpu)) {
            bail!("{what} runs on NVIDIA GPUs; leave --backend, --adapter, --path and --checks out");
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    const fn names_an_adapter_option(&self) -> bool {
        self.adapter.is_some() || self.path.is_some() || self.checks.is_some()
    }

    /// Refuses the options of the wgpu backend.
    fn refuse_gpu_options(&self, backend: &str) -> Result<()> {
        let given = [
            (self.adapter.is_some(), "--adapter"),
            (self.path.is_some(), "--path"),
            (self.checks.is_some(), "--checks"),
        ];
        if let Some((_, option)) = given.into_iter().find(|(given, _)| *given) {
            bail!(
                "{option} applies to wgpu's adapters and has no effect with --backend {backend}; leave one of the two out"
            );
        }
        Ok(())
    }

    fn open_wgpu(&self) -> Result<Wgpu> {
        let adapter = block_on(choose_adapter(self.adapter.as_deref()))?;
        let path = self.path.map_or(Path::Matrices, Path::from);
        let checks = self.checks.map_or(Checks::default(), Checks::from);
        // SAFETY: wgpu asks for no more than to know that its experimental features may have mistakes that safe calls
        // run into. Of these, kvpack uses cooperative matrices, in `attend_matrix`, `attend_run`, `attend_run_apart`
        // and the kernels of statistics whose names end as that of the first; kvpack-weights uses them in
        // `linear_matrix` and `linear_rows_matrix`. `kvpack check` checks all of these.
        let experimental = unsafe { wgpu::ExperimentalFeatures::enabled() };
        let mut requirements = Requirements::of(&adapter, experimental).restricted_to(path);
        requirements.features |= compiled::wanted(&adapter);
        let (device, queue) = block_on(open_device(&adapter, requirements))?;
        let kernels = Kernels::new(&device, checks);
        let kernels = match compiled::open(&device) {
            Some(cache) => kernels.with_pipeline_cache(cache),
            None => kernels,
        };
        let wgpu = Wgpu::with_kernels(queue, Arc::new(kernels))?.restricted_to(path);
        if self.path.is_some() && wgpu.capabilities().path() != path {
            bail!(
                "--path {path}: '{}' only has what the path {} needs; leave --path out or name a lower one",
                adapter.get_info().name,
                wgpu.capabilities().path()
            );
        }
        Ok(wgpu)
    }
}

impl From<PathName> for Path {
    fn from(name: PathName) -> Self {
        match name {
            PathName::Floor => Self::Floor,
            PathName::F16 => Self::F16,
            PathName::Subgroups => Self::Subgroups,
            PathName::Matrices => Self::Matrices,
        }
    }
}

impl From<ChecksName> for Checks {
    fn from(name: ChecksName) -> Self {
        match name {
            ChecksName::Safe => Self::Safe,
            ChecksName::Indices => Self::Indices,
            ChecksName::Trusted => Self::Trusted,
        }
    }
}
