//! Dense tensors on the device.

use std::any::Any;
use std::sync::Arc;

use super::buffers::{self, ARRAY_USAGES};
use super::capabilities::KernelLimits;
use super::guard::{self, Request};
use crate::{ElementType, Elements, Error, Result};

/// Bytes of one transfer between host and device.
const CHUNK_BYTES: u64 = 64 << 20;

/// A dense array of f32, f16 or bf16 elements in a storage buffer: kvpack's own, or part of an engine's buffer.
///
/// ```no_run
/// # fn example(projected_keys: wgpu::Buffer) -> kvpack_device::Result<()> {
/// use kvpack_device::ElementType;
/// use kvpack_device::wgpu::Tensor;
/// // 512 tokens of 8 KV heads of 128 channels, 1024 bytes into a buffer of the engine.
/// let keys = Tensor::from_buffer(projected_keys, 1024, 512 * 8 * 128, ElementType::F16)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Tensor {
    buffer: wgpu::Buffer,
    offset: u64,
    elements: usize,
    element_type: ElementType,
    /// Keeps the elements alive and in place.
    #[expect(dead_code, reason = "held only to keep the elements alive")]
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// A tensor as bound by kernels that read single elements. The binding begins at a multiple of the device's alignment,
/// at or before the tensor.
#[derive(Clone, Debug)]
pub struct ElementBinding<'a> {
    /// The part of the buffer to bind.
    pub buffer: wgpu::BufferBinding<'a>,
    /// Index of the tensor's first element within it.
    pub first_element: u32,
}

impl Tensor {
    /// The `elements` elements in `buffer`, starting at byte `offset`. The caller still owns and fills the buffer.
    ///
    /// # Errors
    /// [`Error::Buffer`] when the buffer lacks the usage `STORAGE`, the offset is not a multiple of the element size,
    /// or the elements, rounded up to whole 32-bit words, do not lie within the buffer.
    pub fn from_buffer(buffer: wgpu::Buffer, offset: u64, elements: usize, element_type: ElementType) -> Result<Self> {
        let reject = |reason: String| Err(Error::Buffer { what: "a tensor", reason });
        if !buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            return reject(format!("its usages are {:?}; it needs STORAGE", buffer.usage()));
        }
        let size = element_type.bytes() as u64;
        if !offset.is_multiple_of(size) {
            return reject(format!("offset {offset} is not a multiple of the element size, {size} bytes"));
        }
        let end = (elements as u64).checked_mul(size).and_then(|bytes| bytes.checked_add(offset));
        match end.and_then(|end| end.checked_next_multiple_of(4)) {
            Some(end) if elements > 0 && end <= buffer.size() => {
                Ok(Self { buffer, offset, elements, element_type, owner: None })
            }
            _ => reject(format!(
                "{elements} elements of {size} bytes at offset {offset}, in whole 32-bit words, of {} bytes; at least \
                 one element is needed, and all must lie within the buffer",
                buffer.size()
            )),
        }
    }

    /// The same tensor, which keeps `owner` alive as long as it or one of its clones lives. The owner is what an
    /// engine's allocator returned for the elements. Holding it stops the allocator from moving them or reusing their
    /// memory before the submitted work is done.
    #[must_use]
    pub fn kept_by(self, owner: impl Any + Send + Sync) -> Self {
        Self { owner: Some(Arc::new(owner)), ..self }
    }

    /// A tensor of zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Limit`] or [`Error::DeviceLost`].
    pub fn zeroed(device: &wgpu::Device, elements: usize, element_type: ElementType) -> Result<Self> {
        let size = padded_bytes(device, elements, element_type)?;
        let buffer = buffers::create_now(device, "tensor", size, ARRAY_USAGES)?;
        Ok(Self { buffer, offset: 0, elements, element_type, owner: None })
    }

    /// Copies elements to a new tensor.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Limit`] or [`Error::DeviceLost`].
    pub async fn upload(device: &wgpu::Device, queue: &wgpu::Queue, elements: Elements<'_>) -> Result<Self> {
        let element_type = elements.element_type();
        let size = padded_bytes(device, elements.len(), element_type)?;
        let buffer = buffers::create(device, "tensor", size, ARRAY_USAGES).await?;
        for (i, chunk) in elements.bytes().chunks(CHUNK_BYTES as usize).enumerate() {
            let words = chunk.len() / 4 * 4;
            let offset = i as u64 * CHUNK_BYTES;
            let request = Request { what: "staging of an upload", bytes: chunk.len() as u64 };
            let write = || {
                queue.write_buffer(&buffer, offset, &chunk[..words]);
                if let [low, high] = chunk[words..] {
                    queue.write_buffer(&buffer, offset + words as u64, &[low, high, 0, 0]);
                }
                // wgpu frees staging memory once a submission has used it.
                queue.submit([]);
            };
            guard::captured(device, request, write).await?;
        }
        Ok(Self { buffer, offset: 0, elements: elements.len(), element_type, owner: None })
    }

    /// Copies the elements to the host as f32 once all submitted work is done.
    ///
    /// # Errors
    /// [`Error::Buffer`] when the buffer lacks the usage `COPY_SRC`; [`Error::OutOfMemory`]; [`Error::DeviceLost`].
    pub async fn download(&self, device: &wgpu::Device, queue: &wgpu::Queue) -> Result<Vec<f32>> {
        if !self.buffer.usage().contains(wgpu::BufferUsages::COPY_SRC) {
            return Err(Error::Buffer {
                what: "a download",
                reason: format!("its usages are {:?}; it needs COPY_SRC", self.buffer.usage()),
            });
        }
        let mut elements = Vec::with_capacity(self.elements);
        let (start, end) = (self.offset / 4 * 4, self.end().next_multiple_of(4));
        for at in (start..end).step_by(CHUNK_BYTES as usize) {
            let bytes = buffers::read(device, queue, &self.buffer, at, CHUNK_BYTES.min(end - at)).await?;
            self.element_type.read_f32(&bytes, &mut elements);
        }
        // A tensor of 16-bit elements may begin and end in the middle of a word.
        elements.drain(..(self.offset - start) as usize / self.element_type.bytes());
        elements.truncate(self.elements);
        Ok(elements)
    }

    /// A tensor of the same buffer that has `elements` of the elements, starting at `first`.
    ///
    /// # Errors
    /// [`Error::Buffer`] when they do not lie within the tensor.
    pub fn slice(&self, first: usize, elements: usize) -> Result<Self> {
        if elements == 0 || first.checked_add(elements).is_none_or(|end| end > self.elements) {
            let reason = format!("elements {first} .. {first} + {elements} of {}", self.elements);
            return Err(Error::Buffer { what: "part of a tensor", reason });
        }
        let offset = self.offset + (first * self.element_type.bytes()) as u64;
        Ok(Self { offset, elements, ..self.clone() })
    }

    /// Encodes a copy of all elements to the start of another tensor.
    ///
    /// # Errors
    /// [`Error::Buffer`] when the other tensor has another type, has fewer elements or lies in the same buffer, when a
    /// buffer lacks the usage `COPY_SRC` or `COPY_DST`, or the copy does not consist of whole 32-bit words.
    pub fn encode_copy(&self, to: &Self, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        let bytes = self.check_copy(to)?;
        encoder.copy_buffer_to_buffer(&self.buffer, self.offset, &to.buffer, to.offset, bytes);
        Ok(())
    }

    /// The bytes of such a copy.
    ///
    /// # Errors
    /// As [`Tensor::encode_copy`].
    pub fn check_copy(&self, to: &Self) -> Result<u64> {
        let reject = |reason: String| Err(Error::Buffer { what: "a copy of a tensor", reason });
        if (self.element_type, self.elements) != (to.element_type, self.elements.min(to.elements)) {
            let (given, held) = ((self.elements, self.element_type), (to.elements, to.element_type));
            return reject(format!("{} elements of {:?} to {} of {:?}", given.0, given.1, held.0, held.1));
        }
        if self.buffer == to.buffer {
            return reject("both tensors lie in one buffer; a copy needs two".into());
        }
        let (from, into) = (self.buffer.usage(), to.buffer.usage());
        if !from.contains(wgpu::BufferUsages::COPY_SRC) || !into.contains(wgpu::BufferUsages::COPY_DST) {
            return reject(format!("from usages {from:?} to {into:?}; it needs COPY_SRC and COPY_DST"));
        }
        let bytes = self.end() - self.offset;
        if [self.offset, to.offset, bytes].iter().any(|at| !at.is_multiple_of(wgpu::COPY_BUFFER_ALIGNMENT)) {
            let (from, into) = (self.offset, to.offset);
            return reject(format!("{bytes} bytes from byte {from} to byte {into}; all three must be multiples of 4"));
        }
        Ok(bytes)
    }

    /// Number of elements.
    pub const fn elements(&self) -> usize {
        self.elements
    }

    /// Type of the elements.
    pub const fn element_type(&self) -> ElementType {
        self.element_type
    }

    /// The buffer.
    pub const fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    /// Bytes before the first element in the buffer.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// The tensor as bound by kernels that read several elements at a time, starting at its first element. The offset
    /// must be a multiple of the device's alignment of storage bindings.
    pub fn binding(&self) -> wgpu::BufferBinding<'_> {
        let size = wgpu::BufferSize::new(self.end().next_multiple_of(4) - self.offset);
        wgpu::BufferBinding { buffer: &self.buffer, offset: self.offset, size }
    }

    /// Whether both share bytes of one buffer.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.buffer == other.buffer && self.offset < other.end() && other.offset < self.end()
    }

    /// Checks that [`Tensor::binding`] is valid on a device with these limits.
    ///
    /// # Errors
    /// [`Error::Buffer`] when the offset is not aligned, [`Error::Limit`] when the tensor is larger than a binding.
    pub fn check_aligned(&self, what: &'static str, limits: &wgpu::Limits) -> Result<()> {
        check_tensor_bytes(self.end().next_multiple_of(4) - self.offset, limits)?;
        let alignment = alignment(limits);
        if self.offset.is_multiple_of(alignment) {
            return Ok(());
        }
        let reason = format!("it begins at byte {} of its buffer, not at a multiple of {alignment}", self.offset);
        Err(Error::Buffer { what, reason })
    }

    /// The tensor as bound by kernels that read single elements, at any offset.
    ///
    /// # Errors
    /// [`Error::Limit`] when the tensor exceeds a binding, or has more elements than a 32-bit index can address.
    pub fn element_binding(&self, limits: &wgpu::Limits) -> Result<ElementBinding<'_>> {
        let start = self.offset / alignment(limits) * alignment(limits);
        let size = self.end().next_multiple_of(4) - start;
        let first_element = (self.offset - start) / self.element_type.bytes() as u64;
        check_tensor_bytes(size, limits)?;
        check_indices(first_element + self.elements as u64)?;
        Ok(ElementBinding {
            buffer: wgpu::BufferBinding { buffer: &self.buffer, offset: start, size: wgpu::BufferSize::new(size) },
            first_element: first_element as u32,
        })
    }

    fn end(&self) -> u64 {
        self.offset + self.elements as u64 * self.element_type.bytes() as u64
    }
}

fn alignment(limits: &wgpu::Limits) -> u64 {
    u64::from(limits.min_storage_buffer_offset_alignment.max(4))
}

/// Bytes to allocate for a tensor: whole words, and at least one.
fn padded_bytes(device: &wgpu::Device, elements: usize, element_type: ElementType) -> Result<u64> {
    let bytes = (elements as u64).saturating_mul(element_type.bytes() as u64);
    check_tensor_bytes(bytes, &device.limits())?;
    check_indices(elements as u64)?;
    Ok(bytes.next_multiple_of(4).max(4))
}

fn check_tensor_bytes(bytes: u64, limits: &wgpu::Limits) -> Result<()> {
    let allowed = KernelLimits::new(limits).binding_bytes;
    if bytes <= allowed {
        return Ok(());
    }
    let hint = "pass fewer tokens at once, or 16-bit elements instead of f32";
    Err(Error::Limit { what: "a tensor in bytes".into(), needed: bytes, allowed, hint })
}

fn check_indices(elements: u64) -> Result<()> {
    let allowed = u64::from(u32::MAX);
    if elements <= allowed {
        return Ok(());
    }
    let hint = "pass fewer tokens at once";
    Err(Error::Limit { what: "the elements of a tensor".into(), needed: elements, allowed, hint })
}
