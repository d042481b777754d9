//! Tensors as the copy engine of compute capability 9.0 reads them: by boxes, to shared memory.

use std::ffi::c_void;
use std::sync::OnceLock;

use cudarc::driver::sys::CUresult;

use super::libraries::driver_symbol;
use crate::{Error, Result};

/// `cuTensorMapEncodeTiled`: map, element type, rank, address, sizes, strides, box, steps within the box, interleaving,
/// swizzle, promotion and what is read outside.
type Encode = unsafe extern "C" fn(
    *mut c_void,
    u32,
    u32,
    *mut c_void,
    *const u64,
    *const u64,
    *const u32,
    *const u32,
    u32,
    u32,
    u32,
    u32,
) -> CUresult;

const ELEMENT_F16: u32 = 6;
const NO_INTERLEAVING: u32 = 0;
const SWIZZLE_128_BYTES: u32 = 3;
const PROMOTE_256_BYTES: u32 = 3;
const ZEROS_OUTSIDE: u32 = 0;

/// A matrix of 16-bit elements, row after row, of which the copy engine reads boxes of 64 columns. What lies outside
/// of the matrix is read as 0. In shared memory a row of a box is 128 bytes, and part p of 16 bytes of row r lies at
/// part p ^ (r % 8).
///
/// A kernel takes it by value, as a `__grid_constant__` parameter.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct TensorMap([u64; 16]);

impl TensorMap {
    /// The matrix `[rows, columns]` at `address`, read by boxes of `box_rows` rows. The address is a multiple of 16
    /// bytes, and columns are a multiple of 8.
    ///
    /// # Errors
    /// [`Error::Adapter`] when the driver is older than CUDA 12.0, [`Error::Buffer`] when it refuses the matrix.
    pub fn new(address: u64, rows: usize, columns: usize, box_rows: usize) -> Result<Self> {
        static ENCODE: OnceLock<Option<Encode>> = OnceLock::new();
        let find = || {
            driver_symbol(b"cuTensorMapEncodeTiled\0").map(|found| {
                // SAFETY: The driver declares the function of this name with these arguments since CUDA 12.0.
                unsafe { std::mem::transmute::<*mut c_void, Encode>(found) }
            })
        };
        let Some(encode) = ENCODE.get_or_init(find) else {
            let reason = "the driver is older than CUDA 12.0 and has no cuTensorMapEncodeTiled; install a newer one";
            return Err(Error::Adapter { reason: reason.into() });
        };
        let mut map = Self([0; 16]);
        let (sizes, strides) = ([columns as u64, rows as u64], [2 * columns as u64]);
        let (shape, steps) = ([64, box_rows as u32], [1; 2]);
        // SAFETY: The lists have two elements, and one stride. The driver reads no memory at `address`.
        let encoded = unsafe {
            encode(
                map.0.as_mut_ptr().cast(),
                ELEMENT_F16,
                2,
                address as *mut c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                shape.as_ptr(),
                steps.as_ptr(),
                NO_INTERLEAVING,
                SWIZZLE_128_BYTES,
                PROMOTE_256_BYTES,
                ZEROS_OUTSIDE,
            )
        };
        if encoded == CUresult::CUDA_SUCCESS {
            return Ok(map);
        }
        let reason = format!("the copy engine does not read {rows} rows of {columns} at {address:#x}: {encoded:?}");
        Err(Error::Buffer { what: "a matrix", reason })
    }
}
