//! Kernels bound to their buffers, ready to encode.

use std::sync::Arc;

use super::counted::OUT_OF_BOUNDS;
use super::kernels::{Checks, Kernel, Kernels};
use super::shader::Variant;
use crate::{Error, Result};

/// Invocations of a workgroup in kernels that give every invocation one piece of the output.
pub const FLAT_WORKGROUP: u32 = 64;

/// One dispatch: a kernel, its buffers and its grid.
#[derive(Clone, Debug)]
pub struct Launch {
    kernel: Arc<Kernel>,
    buffers: wgpu::BindGroup,
    workgroups: [u32; 3],
    /// Tables that it binds.
    tables: usize,
}

/// Most tables of a kernel: as many bindings with an offset of the dispatch as every device of WebGPU has.
const MOST_TABLES: usize = 4;

impl Launch {
    /// Binds `buffers` to a variant, by their names in the shader. The kernel has all run-time checks of wgpu: it
    /// cannot leave the buffers, and its loops end. Its workgroup memory is not cleared before it runs.
    ///
    /// # Errors
    /// [`Error::Limit`] when the grid exceeds the workgroups that the device dispatches; [`Error::Plan`] when a buffer
    /// is missing, or one is both read and written; [`Error::Gpu`] when wgpu refuses one.
    pub fn checked(
        kernels: &Kernels,
        variant: &Variant,
        buffers: &[(&str, wgpu::BufferBinding<'_>)],
        workgroups: [u32; 3],
    ) -> Result<Self> {
        Self::bound(kernels, variant, Checks::Safe, buffers, workgroups)
    }

    /// The same with the checks that `kernels` was made with, by default none.
    ///
    /// # Errors
    /// Those of [`checked`](Self::checked).
    ///
    /// # Safety
    /// With these buffers and this grid, the kernel indexes within the buffers, its loops end, and it never divides by
    /// zero, whatever the buffers contain when it runs.
    pub unsafe fn trusted(
        kernels: &Kernels,
        variant: &Variant,
        buffers: &[(&str, wgpu::BufferBinding<'_>)],
        workgroups: [u32; 3],
    ) -> Result<Self> {
        Self::bound(kernels, variant, kernels.checks(), buffers, workgroups)
    }

    fn bound(
        kernels: &Kernels,
        variant: &Variant,
        checks: Checks,
        buffers: &[(&str, wgpu::BufferBinding<'_>)],
        workgroups: [u32; 3],
    ) -> Result<Self> {
        check_grid(workgroups, kernels.device().limits().max_compute_workgroups_per_dimension)?;
        let kernel = kernels.get(variant, checks)?;
        let counter = kernels.counter().map(|counter| (OUT_OF_BOUNDS, counter.as_entire_buffer_binding()));
        let buffers: Vec<_> = buffers.iter().cloned().chain(counter).collect();
        let buffers = kernel.bind(kernels.device(), &buffers)?;
        let tables = kernel.tables();
        if tables > MOST_TABLES {
            let reason = format!("{} binds {tables} tables, and {MOST_TABLES} are allowed", variant.label());
            return Err(Error::Plan { what: "bind group", reason });
        }
        Ok(Self { kernel, buffers, workgroups, tables })
    }

    /// Encodes the dispatch. Does not submit, wait or allocate.
    pub fn encode(&self, pass: &mut wgpu::ComputePass<'_>) {
        self.encode_at(pass, self.workgroups, 0);
    }

    /// Encodes the dispatch with another grid. Its tables begin `tables` bytes after those that are bound.
    ///
    /// # Safety
    /// What [`trusted`](Self::trusted) asks for holds with this grid and these tables too. Nothing is asked for where
    /// the launch is [checked](Self::checked).
    pub unsafe fn encode_grid(&self, pass: &mut wgpu::ComputePass<'_>, workgroups: [u32; 3], tables: u32) {
        self.encode_at(pass, workgroups, tables);
    }

    fn encode_at(&self, pass: &mut wgpu::ComputePass<'_>, [x, y, z]: [u32; 3], tables: u32) {
        pass.set_pipeline(self.kernel.pipeline());
        pass.set_bind_group(0, &self.buffers, &[tables; MOST_TABLES][..self.tables]);
        pass.dispatch_workgroups(x, y, z);
    }
}

/// Dispatches that belong together, in order.
#[derive(Clone, Debug, Default)]
pub struct Launches(Vec<Launch>);

impl Launches {
    /// Encodes all dispatches into an open pass. Does not submit, wait or allocate.
    pub fn encode(&self, pass: &mut wgpu::ComputePass<'_>) {
        self.0.iter().for_each(|launch| launch.encode(pass));
    }

    /// Encodes all dispatches with other grids, one each, and tables that begin `tables` bytes after those that are
    /// bound.
    ///
    /// # Safety
    /// That of [`Launch::encode_grid`], for each.
    pub unsafe fn encode_grids(
        &self,
        grids: impl Iterator<Item = [u32; 3]>,
        tables: u32,
        pass: &mut wgpu::ComputePass<'_>,
    ) {
        self.0.iter().zip(grids).for_each(|(launch, grid)| launch.encode_at(pass, grid, tables));
    }

    /// Number of dispatches.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl IntoIterator for Launches {
    type Item = Launch;
    type IntoIter = std::vec::IntoIter<Launch>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl FromIterator<Launch> for Launches {
    fn from_iter<T: IntoIterator<Item = Launch>>(launches: T) -> Self {
        Self(launches.into_iter().collect())
    }
}

/// A grid of at least `invocations` invocations, for kernels that flatten it (`pack/flat.wgsl`).
///
/// # Errors
/// [`Error::Limit`] when the device cannot dispatch that many at once.
pub fn flat_grid(invocations: u64, limits: &wgpu::Limits) -> Result<[u32; 3]> {
    let most = u64::from(limits.max_compute_workgroups_per_dimension);
    let workgroups = invocations.div_ceil(u64::from(FLAT_WORKGROUP));
    let allowed = most.saturating_mul(most).saturating_mul(u64::from(FLAT_WORKGROUP)).min(u64::from(u32::MAX));
    if invocations > allowed {
        return Err(Error::Limit {
            what: "the invocations of a dispatch".into(),
            needed: invocations,
            allowed,
            hint: "pass fewer tokens at once",
        });
    }
    Ok(folded_grid(workgroups, most))
}

/// Checks that a dispatch has no more than `most` workgroups in each dimension.
fn check_grid(workgroups: [u32; 3], most: u32) -> Result<()> {
    match workgroups.into_iter().find(|&workgroups| workgroups > most) {
        None => Ok(()),
        Some(needed) => Err(Error::Limit {
            what: "the workgroups of a dispatch in one dimension".into(),
            needed: needed.into(),
            allowed: most.into(),
            hint: "pass fewer tokens at once",
        }),
    }
}

/// A grid of at least `workgroups` workgroups in rows of no more than `most`. There are no more than `most` rows
/// either, because [`flat_grid`] refuses larger requests.
pub fn folded_grid(workgroups: u64, most: u64) -> [u32; 3] {
    let rows = workgroups.div_ceil(most).max(1);
    [workgroups.div_ceil(rows) as u32, rows as u32, 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_cover_and_stay_within_limits() {
        let limits = wgpu::Limits::defaults();
        for invocations in [0, 1, 64, 65, 64 * 65535, 64 * 65535 + 1, u64::from(u32::MAX)] {
            let [x, y, z] = flat_grid(invocations, &limits).unwrap();
            assert!(u64::from(x) * u64::from(y) * 64 >= invocations && z == 1);
            assert!(x <= 65535 && y <= 65535);
        }
        assert!(flat_grid(1 << 32, &limits).is_err());
        // A device with the largest possible limit.
        let boundless = wgpu::Limits { max_compute_workgroups_per_dimension: u32::MAX, ..limits };
        assert_eq!(flat_grid(65, &boundless), Ok([2, 1, 1]));
    }

    #[test]
    fn every_dimension_of_a_grid_has_a_limit() {
        assert!(check_grid([65535, 65535, 1], 65535).is_ok());
        for grid in [[65536, 1, 1], [1, 65536, 1], [1, 1, 65536]] {
            assert!(matches!(check_grid(grid, 65535), Err(Error::Limit { needed: 65536, allowed: 65535, .. })));
        }
    }
}
