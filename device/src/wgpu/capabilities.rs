//! What a device can do, what to request from an adapter, and the paths that kernels can take.

use std::fmt;
use std::str::FromStr;

use super::adapters::adapter_of;
use crate::{Error, Result};

/// Storage buffers that a kernel may bind.
const FLOOR_STORAGE_BUFFERS: u32 = 8;
/// Most storage buffers that any kernel binds: `append` of centred keys next to `append` of values.
const MOST_STORAGE_BUFFERS: u32 = 12;
/// Bytes of workgroup memory that a kernel may use on the floor path.
const FLOOR_WORKGROUP_MEMORY: u32 = 16 << 10;
/// Invocations of a workgroup on the floor path.
const FLOOR_INVOCATIONS: u32 = 256;
/// Largest binding in bytes. Metal receives the sizes behind `arrayLength` as 32 bits, and kernels clamp by them.
pub const MOST_BINDING_BYTES: u64 = (1 << 32) - 256;
/// Invocations of a subgroup that multiplies cooperative matrices.
const MATRIX_SUBGROUP: u32 = 32;
/// What kernels with cooperative matrices use of wgpu besides subgroups. Lanes of a subgroup exchange matrices through
/// workgroup memory, and wait for no other subgroup.
const MATRIX_FEATURES: wgpu::Features =
    wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(wgpu::Features::SUBGROUP_BARRIER);

/// Restricts the kernels to part of what a device can do, so that tests and comparisons can force a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Path {
    /// The floor of WebGPU: no 16-bit floats, no subgroups, 16 KiB of workgroup memory, 256 invocations and 8 storage
    /// buffers. A separate launch merges the states.
    Floor,
    /// No subgroups. Every other feature is used where the device has it.
    F16,
    /// No cooperative matrices. Subgroups and 16-bit floats are used where the device has them.
    Subgroups,
    /// All features, including cooperative matrices, which wgpu calls experimental.
    Matrices,
}

impl Path {
    /// All paths, in ascending order of the features that they use.
    pub const ALL: [Self; 4] = [Self::Floor, Self::F16, Self::Subgroups, Self::Matrices];
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Floor => "floor",
            Self::F16 => "f16",
            Self::Subgroups => "subgroups",
            Self::Matrices => "matrices",
        })
    }
}

impl FromStr for Path {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|path| path.to_string() == text).ok_or_else(|| Error::Plan {
            what: "kernel path",
            reason: format!("there is no path '{text}'; the paths are floor, f16, subgroups and matrices"),
        })
    }
}

/// Range of the subgroup sizes of a device, in invocations. A driver may choose a size per pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SubgroupSizes {
    /// Smallest.
    pub min: u32,
    /// Largest.
    pub max: u32,
}

/// Where a device can take timestamps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Timestamps {
    /// Nowhere.
    None,
    /// At the ends of a pass.
    Passes,
    /// Between passes as well.
    Encoders,
}

/// Limits of a device that kernels are planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelLimits {
    /// Largest storage binding, and the buffer behind it, in bytes. Below 4 GiB, since shaders receive sizes as 32
    /// bits.
    pub binding_bytes: u64,
    /// Alignment of the offset of a storage binding, in bytes.
    pub binding_alignment: u64,
    /// Storage buffers per kernel.
    pub storage_buffers: u32,
    /// Workgroup memory in bytes.
    pub workgroup_memory: u32,
    /// Invocations per workgroup.
    pub invocations: u32,
    /// Workgroups in each dimension of a dispatch.
    pub workgroups: u32,
}

impl KernelLimits {
    /// The limits of a device.
    pub fn new(limits: &wgpu::Limits) -> Self {
        Self {
            binding_bytes: limits.max_storage_buffer_binding_size.min(limits.max_buffer_size).min(MOST_BINDING_BYTES),
            binding_alignment: u64::from(limits.min_storage_buffer_offset_alignment),
            storage_buffers: limits.max_storage_buffers_per_shader_stage,
            workgroup_memory: limits.max_compute_workgroup_storage_size,
            invocations: limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x),
            workgroups: limits.max_compute_workgroups_per_dimension,
        }
    }
}

/// What kernels may use on a device.
///
/// 16-bit floats and subgroups are independent: some devices have only one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Capabilities {
    /// Whether shaders may use 16-bit floats.
    pub f16: bool,
    /// Subgroup operations, if there are any.
    pub subgroups: Option<SubgroupSizes>,
    /// Whether a workgroup may read what other workgroups of its launch have written, once an atomic counter says that
    /// they are done. This takes Vulkan and wgpu's `MEMORY_DECORATION_COHERENT`. WGSL has no barrier beyond the
    /// workgroup, but the storage barriers that naga writes as SPIR-V order coherent memory for the whole device.
    pub coherent: bool,
    /// Whether kernels may multiply cooperative matrices: 16 × 16 × 16 in f16 with f32 sums, by subgroups of 32. The
    /// device must have been created with them: see [`Requirements::of`].
    pub matrices: bool,
    /// Where timestamps can be taken.
    pub timestamps: Timestamps,
    /// Limits.
    pub limits: KernelLimits,
}

impl Capabilities {
    /// The capabilities of a device as it was created. Features and limits that were not requested do not count.
    ///
    /// # Errors
    /// [`Error::Limit`] when the device is below the floor that every kernel needs: 8 storage buffers, 16 KiB of
    /// workgroup memory and workgroups of 256.
    pub fn from_device(device: &wgpu::Device) -> Result<Self> {
        let capabilities = Self::new(&device.adapter_info(), device.features(), &device.limits());
        capabilities.limits.check_floor()?;
        let enabled = device.features().contains(MATRIX_FEATURES);
        // Only the adapter knows which matrices its devices multiply.
        let adapter = if enabled { adapter_of(device) } else { None };
        Ok(capabilities.with_matrices(adapter.is_some_and(|adapter| offers_matrices(&adapter))))
    }

    /// The capabilities of an adapter whose device is created with all of its [`Requirements`].
    pub fn from_adapter(adapter: &wgpu::Adapter, experimental: wgpu::ExperimentalFeatures) -> Self {
        let requirements = Requirements::of(adapter, experimental);
        let capabilities = Self::new(&adapter.get_info(), requirements.features, &requirements.limits);
        let matrices = requirements.features.contains(MATRIX_FEATURES);
        capabilities.with_matrices(matrices)
    }

    /// Adds cooperative matrices if they are offered and the device has the f16 and the subgroups that kernels with
    /// matrices need too.
    const fn with_matrices(self, offered: bool) -> Self {
        Self { matrices: offered && self.f16 && self.subgroups.is_some(), ..self }
    }

    fn new(info: &wgpu::AdapterInfo, features: wgpu::Features, limits: &wgpu::Limits) -> Self {
        let sizes = SubgroupSizes { min: info.subgroup_min_size, max: info.subgroup_max_size };
        let timestamps = if !features.contains(wgpu::Features::TIMESTAMP_QUERY) {
            Timestamps::None
        } else if !features.contains(wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS) {
            Timestamps::Passes
        } else {
            Timestamps::Encoders
        };
        Self {
            f16: features.contains(wgpu::Features::SHADER_F16),
            subgroups: features.contains(wgpu::Features::SUBGROUP).then_some(sizes),
            coherent: info.backend == wgpu::Backend::Vulkan
                && features.contains(wgpu::Features::MEMORY_DECORATION_COHERENT),
            matrices: false,
            timestamps,
            limits: KernelLimits::new(limits),
        }
    }

    /// These capabilities, restricted to what `path` allows.
    pub fn restricted_to(self, path: Path) -> Self {
        let floor = KernelLimits {
            workgroup_memory: self.limits.workgroup_memory.min(FLOOR_WORKGROUP_MEMORY),
            invocations: self.limits.invocations.min(FLOOR_INVOCATIONS),
            storage_buffers: self.limits.storage_buffers.min(FLOOR_STORAGE_BUFFERS),
            ..self.limits
        };
        match path {
            Path::Floor => {
                Self { f16: false, subgroups: None, coherent: false, matrices: false, limits: floor, ..self }
            }
            Path::F16 => Self { subgroups: None, matrices: false, ..self },
            Path::Subgroups => Self { matrices: false, ..self },
            Path::Matrices => self,
        }
    }

    /// The lowest path that allows all of these capabilities.
    pub fn path(&self) -> Path {
        match (self.f16, self.subgroups) {
            (_, Some(_)) if self.matrices => Path::Matrices,
            (_, Some(_)) => Path::Subgroups,
            (true, None) => Path::F16,
            (false, None) => Path::Floor,
        }
    }
}

/// Whether `adapter` multiplies the cooperative matrices that kernels use, by subgroups of the required size.
pub fn offers_matrices(adapter: &wgpu::Adapter) -> bool {
    use wgpu::CooperativeScalarType::{F16, F32};
    let info = adapter.get_info();
    let shapes = adapter.cooperative_matrix_properties();
    let used = |shape: &wgpu::CooperativeMatrixProperties| {
        (shape.m_size, shape.n_size, shape.k_size) == (16, 16, 16) && (shape.ab_type, shape.cr_type) == (F16, F32)
    };
    adapter.features().contains(MATRIX_FEATURES)
        && (info.subgroup_min_size, info.subgroup_max_size) == (MATRIX_SUBGROUP, MATRIX_SUBGROUP)
        && shapes.iter().any(used)
}

impl KernelLimits {
    fn check_floor(&self) -> Result<()> {
        let needs = [
            ("storage buffers of a kernel", FLOOR_STORAGE_BUFFERS, self.storage_buffers),
            ("workgroup memory of a kernel in bytes", FLOOR_WORKGROUP_MEMORY, self.workgroup_memory),
            ("invocations of a workgroup", FLOOR_INVOCATIONS, self.invocations),
        ];
        match needs.into_iter().find(|(_, needed, allowed)| allowed < needed) {
            None => Ok(()),
            Some((what, needed, allowed)) => Err(Error::Limit {
                what: what.into(),
                needed: needed.into(),
                allowed: allowed.into(),
                hint: "create the device with at least wgpu::Limits::defaults(), or with kvpack's Requirements",
            }),
        }
    }
}

/// Features and limits to request from an adapter so that kvpack runs at its best. An engine merges them into its own.
///
/// ```no_run
/// use kvpack_device::wgpu::Requirements;
/// # async fn example(adapter: wgpu::Adapter) -> Result<(), Box<dyn std::error::Error>> {
/// // SAFETY: see wgpu::ExperimentalFeatures. Without the token, ExperimentalFeatures::disabled().
/// let experimental = unsafe { wgpu::ExperimentalFeatures::enabled() };
/// let requirements = Requirements::of(&adapter, experimental);
/// let (device, queue) = adapter
///     .request_device(&wgpu::DeviceDescriptor {
///         required_features: requirements.features | wgpu::Features::PIPELINE_CACHE,
///         required_limits: requirements.limits,
///         experimental_features: requirements.experimental,
///         ..Default::default()
///     })
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Requirements {
    /// Features to enable.
    pub features: wgpu::Features,
    /// Limits to ask for.
    pub limits: wgpu::Limits,
    /// Whether experimental features may be enabled.
    pub experimental: wgpu::ExperimentalFeatures,
}

impl Requirements {
    /// The useful features and limits of `adapter`: 16-bit floats, subgroups, coherent memory and timestamps where it
    /// has them; the largest buffers, bindings and workgroup memory that it allows; as many storage buffers as kernels
    /// bind; and the smallest alignment of storage offsets that it supports. Everything else keeps the WebGPU default,
    /// or the adapter's value where that is lower.
    ///
    /// Cooperative matrices, by which many queries attend several times as fast, are among the features where `adapter`
    /// offers those that kernels use and `experimental` allows them. wgpu calls them experimental: it does not promise
    /// that safe calls are sound with them, and so its token takes `unsafe` to make.
    pub fn of(adapter: &wgpu::Adapter, experimental: wgpu::ExperimentalFeatures) -> Self {
        let matrices = experimental.is_enabled() && offers_matrices(adapter);
        let useful = wgpu::Features::SHADER_F16
            | wgpu::Features::SUBGROUP
            | wgpu::Features::MEMORY_DECORATION_COHERENT
            | wgpu::Features::TIMESTAMP_QUERY
            | wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS
            | wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES;
        let available = adapter.limits();
        let limits = wgpu::Limits {
            max_storage_buffer_binding_size: available.max_storage_buffer_binding_size,
            max_buffer_size: available.max_buffer_size,
            max_compute_workgroup_storage_size: available.max_compute_workgroup_storage_size,
            max_storage_buffers_per_shader_stage: available
                .max_storage_buffers_per_shader_stage
                .min(MOST_STORAGE_BUFFERS),
            // An engine chooses the offsets of its tensors, and a smaller alignment is allowed wherever the adapter has
            // it.
            min_storage_buffer_offset_alignment: available.min_storage_buffer_offset_alignment,
            ..wgpu::Limits::defaults().or_worse_values_from(&available)
        };
        let mut features = adapter.features() & useful;
        features.set(MATRIX_FEATURES, matrices);
        Self { features, limits, experimental }
    }

    /// Drops the features and storage buffers that `path` forbids, so that a device created with the result cannot
    /// leave the path.
    pub fn restricted_to(self, path: Path) -> Self {
        let forbidden = match path {
            Path::Floor => {
                wgpu::Features::SHADER_F16
                    | wgpu::Features::SUBGROUP
                    | wgpu::Features::MEMORY_DECORATION_COHERENT
                    | MATRIX_FEATURES
            }
            Path::F16 => wgpu::Features::SUBGROUP | MATRIX_FEATURES,
            Path::Subgroups => MATRIX_FEATURES,
            Path::Matrices => wgpu::Features::empty(),
        };
        let mut limits = self.limits;
        if path == Path::Floor {
            let allowed = limits.max_storage_buffers_per_shader_stage;
            limits.max_storage_buffers_per_shader_stage = allowed.min(FLOOR_STORAGE_BUFFERS);
        }
        Self { features: self.features - forbidden, limits, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capabilities(f16: bool, subgroups: bool) -> Capabilities {
        let mut features = wgpu::Features::empty();
        features.set(wgpu::Features::SHADER_F16, f16);
        features.set(wgpu::Features::SUBGROUP, subgroups);
        let info = wgpu::AdapterInfo::new(wgpu::DeviceType::Cpu, wgpu::Backend::Vulkan);
        Capabilities::new(&info, features, &wgpu::Limits::defaults())
    }

    #[test]
    fn paths_restrict() {
        let all = capabilities(true, true);
        assert_eq!(all.path(), Path::Subgroups);
        let matrices = Capabilities { matrices: true, ..all };
        assert_eq!(matrices.path(), Path::Matrices);
        for path in Path::ALL {
            assert_eq!(matrices.restricted_to(path).path(), path);
        }
        assert_eq!(all.restricted_to(Path::F16).path(), Path::F16);
        assert_eq!(all.restricted_to(Path::Floor).path(), Path::Floor);
        assert!(!capabilities(false, true).restricted_to(Path::Subgroups).f16);
        assert_eq!(capabilities(false, true).restricted_to(Path::F16).path(), Path::Floor);
    }

    /// A device created with these limits binds no more than the floor does.
    #[test]
    fn the_floor_has_the_storage_buffers_of_webgpu() {
        let limits = wgpu::Limits { max_storage_buffers_per_shader_stage: MOST_STORAGE_BUFFERS, ..Default::default() };
        let experimental = wgpu::ExperimentalFeatures::disabled();
        let all = Requirements { features: wgpu::Features::SHADER_F16, limits, experimental };
        let buffers = |path| all.clone().restricted_to(path).limits.max_storage_buffers_per_shader_stage;
        assert_eq!((buffers(Path::Floor), buffers(Path::F16)), (FLOOR_STORAGE_BUFFERS, MOST_STORAGE_BUFFERS));
    }

    /// Larger bindings would have a size that 32 bits cannot hold.
    #[test]
    fn bindings_stay_within_indices() {
        let limits =
            wgpu::Limits { max_buffer_size: 1 << 40, max_storage_buffer_binding_size: 1 << 40, ..Default::default() };
        assert_eq!(KernelLimits::new(&limits).binding_bytes, (4 << 30) - 256);
        let limits = wgpu::Limits { max_storage_buffer_binding_size: 1 << 30, ..limits };
        assert_eq!(KernelLimits::new(&limits).binding_bytes, 1 << 30);
    }

    #[test]
    fn paths_have_names() {
        for path in Path::ALL {
            assert_eq!(path.to_string().parse(), Ok(path));
        }
        assert!("fast".parse::<Path>().unwrap_err().to_string().contains("'fast'"));
    }

    #[test]
    fn the_defaults_of_webgpu_are_the_floor() {
        assert_eq!(capabilities(false, false).limits.check_floor(), Ok(()));
        let below = KernelLimits::new(&wgpu::Limits::downlevel_defaults());
        assert!(below.check_floor().unwrap_err().to_string().contains("storage buffers"));
    }
}
