//! What there is to say about a GPU adapter.

use serde::Serialize;

/// What `kvpack list` shows of one adapter.
#[derive(Serialize)]
pub struct AdapterSummary {
    /// The adapter, as the driver names it.
    pub name: String,
    /// Vulkan, Metal, DX12 or GL.
    pub api: String,
    /// Discrete, integrated, virtual or software.
    pub kind: &'static str,
    /// The driver and its version.
    pub driver: String,
    /// PCI vendor and device.
    pub vendor_id: u32,
    /// PCI device.
    pub device_id: u32,
    /// Smallest and largest subgroup; `None` where subgroups are missing.
    pub subgroup_size: Option<[u32; 2]>,
    /// Cooperative matrices that the adapter multiplies, as rows × columns × inner, types of factors and sums.
    pub matrices: Vec<String>,
    /// The features that decide which kernels run.
    pub features: KernelFeatures,
    /// Every feature that the adapter has, by wgpu's name.
    pub all_features: Vec<String>,
    /// The limits that decide how kernels and stores are laid out.
    pub limits: KernelLimits,
}

/// Features that decide which kernels run and how they are timed.
#[derive(Serialize)]
pub struct KernelFeatures {
    /// 16-bit floats in shaders.
    pub f16: bool,
    /// Subgroup operations.
    pub subgroups: bool,
    /// Timestamps on the GPU.
    pub timestamps: bool,
}

/// Limits that decide how kernels and stores are laid out.
#[derive(Serialize)]
pub struct KernelLimits {
    /// Bytes of one storage binding.
    pub storage_binding_bytes: u64,
    /// Bytes of one buffer.
    pub buffer_bytes: u64,
    /// Storage buffers that one shader can bind.
    pub storage_buffers: u32,
    /// Bytes of workgroup memory.
    pub workgroup_bytes: u32,
    /// Invocations of a workgroup.
    pub workgroup_invocations: u32,
    /// Workgroups of a dispatch along one axis.
    pub dispatch_workgroups: u32,
}

impl AdapterSummary {
    /// What there is to say about an adapter.
    pub fn new(adapter: &wgpu::Adapter) -> Self {
        let (info, features, limits) = (adapter.get_info(), adapter.features(), adapter.limits());
        let subgroups = features.contains(wgpu::Features::SUBGROUP);
        Self {
            name: info.name.clone(),
            api: format!("{:?}", info.backend),
            kind: match info.device_type {
                wgpu::DeviceType::DiscreteGpu => "discrete GPU",
                wgpu::DeviceType::IntegratedGpu => "integrated GPU",
                wgpu::DeviceType::VirtualGpu => "virtual GPU",
                wgpu::DeviceType::Cpu => "software",
                wgpu::DeviceType::Other => "other",
            },
            driver: format!("{} {}", info.driver, info.driver_info).trim().into(),
            vendor_id: info.vendor,
            device_id: info.device,
            subgroup_size: subgroups.then_some([info.subgroup_min_size, info.subgroup_max_size]),
            matrices: adapter.cooperative_matrix_properties().iter().map(matrix_name).collect(),
            features: KernelFeatures {
                f16: features.contains(wgpu::Features::SHADER_F16),
                subgroups,
                timestamps: features.contains(wgpu::Features::TIMESTAMP_QUERY),
            },
            all_features: features.iter_names().map(|(name, _)| name.to_owned()).collect(),
            limits: KernelLimits {
                storage_binding_bytes: limits.max_storage_buffer_binding_size,
                buffer_bytes: limits.max_buffer_size,
                storage_buffers: limits.max_storage_buffers_per_shader_stage,
                workgroup_bytes: limits.max_compute_workgroup_storage_size,
                workgroup_invocations: limits.max_compute_invocations_per_workgroup,
                dispatch_workgroups: limits.max_compute_workgroups_per_dimension,
            },
        }
    }
}

fn matrix_name(shape: &wgpu::CooperativeMatrixProperties) -> String {
    let wgpu::CooperativeMatrixProperties { m_size, n_size, k_size, ab_type, cr_type, .. } = shape;
    format!("{m_size}×{n_size}×{k_size} {ab_type:?} → {cr_type:?}").to_lowercase()
}
