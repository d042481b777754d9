//! Tensors of the caller: where their elements lie, found through `__array_interface__`, `__dlpack__` or `data_ptr`.

use std::any::Any;
use std::sync::Arc;

use kvpack::plan::{ElementType, RowLayout};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use smallvec::{SmallVec, smallvec};

use crate::dlpack;
use crate::errors::wrong_tensor;
use crate::torch::Torch;

/// The memory that a tensor lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The host.
    Cpu,
    /// The CUDA device of this ordinal.
    Cuda(i32),
}

/// A number for every dimension. Tensors of a call have three: they need no allocation.
pub type Dimensions<T> = SmallVec<[T; 4]>;

/// A tensor of the caller. It is valid as long as its owner lives.
pub struct View {
    pub address: usize,
    pub shape: Dimensions<usize>,
    /// In elements.
    pub strides: Dimensions<isize>,
    pub element: ElementType,
    pub place: Place,
    pub read_only: bool,
    /// Whether it is a tensor of PyTorch, whose current stream its contents are ordered on.
    pub of_torch: bool,
    /// Keeps the memory.
    pub owner: Py<PyAny>,
}

/// Keeps a tensor of Python alive until the library has let go of it.
struct Owner(#[expect(dead_code, reason = "dropping it is its use")] Py<PyAny>);

impl View {
    /// Looks at a tensor. `what` names it in errors.
    pub fn of(what: &str, tensor: &Bound<'_, PyAny>, stream: Option<u64>) -> PyResult<Self> {
        let torch = Torch::imported(tensor.py()).filter(|torch| torch.has(tensor));
        let view = if let Some(torch) = torch {
            torch.view(what, tensor)?
        } else if tensor.hasattr("__array_interface__")? {
            Self::of_array(what, tensor)?
        } else if tensor.hasattr("__dlpack__")? {
            dlpack::view(what, tensor, stream)?
        } else if tensor.hasattr("data_ptr")? {
            Self::of_pointer(what, tensor)?
        } else {
            let given = tensor.get_type().name()?.to_string();
            return Err(wrong_tensor(
                what,
                format!("a {given} has no __dlpack__, __array_interface__ or data_ptr; pass an array or a tensor"),
            ));
        };
        view.check(what)?;
        Ok(view)
    }

    fn of_array(what: &str, array: &Bound<'_, PyAny>) -> PyResult<Self> {
        let interface = array.getattr("__array_interface__")?;
        let (address, read_only): (usize, bool) = interface.get_item("data")?.extract()?;
        let shape: Dimensions<usize> = interface.get_item("shape")?.extract::<Vec<usize>>()?.into();
        let kind: String = interface.get_item("typestr")?.extract()?;
        let named: String =
            array.getattr("dtype").and_then(|dtype| dtype.getattr("name")?.extract()).unwrap_or_default();
        let element = match (kind.as_str(), named.as_str()) {
            ("<f4", _) => ElementType::F32,
            ("<f2", _) => ElementType::F16,
            ("<V2", "bfloat16") => ElementType::Bf16,
            _ => return Err(wrong_type(what, if named.is_empty() { &kind } else { &named })),
        };
        let strides: Option<Vec<isize>> = interface.call_method1("get", ("strides",))?.extract()?;
        let strides = match strides {
            Some(bytes) => in_elements(what, &bytes, element)?,
            None => contiguous(&shape),
        };
        let (place, owner) = (Place::Cpu, array.clone().unbind());
        Ok(Self { address, shape, strides, element, place, read_only, of_torch: false, owner })
    }

    /// A tensor like PyTorch's: `data_ptr()`, `shape`, `stride()`, `dtype`, `device`.
    fn of_pointer(what: &str, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let address: usize = tensor.call_method0("data_ptr")?.extract()?;
        let shape = tensor.getattr("shape")?.extract::<Vec<usize>>()?.into();
        let strides = tensor.call_method0("stride")?.extract::<Vec<isize>>()?.into();
        let named = tensor.getattr("dtype")?.str()?.to_string();
        let element = match named.rsplit('.').next().unwrap_or_default() {
            "float32" => ElementType::F32,
            "float16" => ElementType::F16,
            "bfloat16" => ElementType::Bf16,
            _ => return Err(wrong_type(what, &named)),
        };
        let device = tensor.getattr("device")?.str()?.to_string();
        let place = match device.split_once(':').unwrap_or((&device, "0")) {
            ("cpu", _) => Place::Cpu,
            ("cuda", ordinal) => Place::Cuda(ordinal.parse().unwrap_or(0)),
            _ => return Err(wrong_tensor(what, format!("it lies on {device}; use the CPU or CUDA"))),
        };
        let owner = tensor.clone().unbind();
        Ok(Self { address, shape, strides, element, place, read_only: false, of_torch: false, owner })
    }

    fn check(&self, what: &str) -> PyResult<()> {
        if self.strides.len() != self.shape.len() {
            return Err(wrong_tensor(what, "it has another number of strides than of dimensions"));
        }
        let size = self.element.bytes();
        if !self.address.is_multiple_of(size) {
            let reason = format!("its address {:#x} is no multiple of {size}, the bytes of an element", self.address);
            return Err(wrong_tensor(what, reason));
        }
        if self.address == 0 && self.elements() > 0 {
            return Err(wrong_tensor(what, "it has no memory (its address is 0)"));
        }
        Ok(())
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().fold(1usize, |all, &n| all.saturating_mul(n))
    }

    /// Checks the device.
    pub fn check_place(&self, what: &str, place: Place) -> PyResult<()> {
        if self.place == place {
            return Ok(());
        }
        let name = |place| match place {
            Place::Cpu => "the CPU".to_owned(),
            Place::Cuda(ordinal) => format!("CUDA device {ordinal}"),
        };
        Err(wrong_tensor(what, format!("it lies on {}; this cache is on {}", name(self.place), name(place))))
    }

    /// Checks the shape: `[any, rest...]`. Returns the first dimension.
    pub fn check_shape(&self, what: &str, names: &str, rest: &[usize]) -> PyResult<usize> {
        match self.shape.split_first() {
            Some((&first, of)) if of == rest => Ok(first),
            _ => {
                let list: Vec<String> = rest.iter().map(usize::to_string).collect();
                let reason = format!("its shape is {:?}; it must be {names} = [.., {}]", self.shape, list.join(", "));
                Err(wrong_tensor(what, reason))
            }
        }
    }

    /// Whether elements lie one after the other in the order of the dimensions.
    pub fn is_contiguous(&self) -> bool {
        let mut wanted = 1isize;
        let mut dimensions = self.shape.iter().zip(&self.strides).rev();
        let same = |(&n, &have): (&usize, &isize)| {
            let right = n <= 1 || have == wanted;
            wanted = wanted.saturating_mul(n as isize);
            right
        };
        self.elements() == 0 || dimensions.all(same)
    }

    /// What keeps the memory.
    pub fn kept(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::new(Owner(Python::attach(|py| self.owner.clone_ref(py))))
    }

    /// The layout of rows `[tokens, kv_heads, head_dim]`, if it is one that the library reads: the channels of a row lie
    /// together, and no rows overlap.
    pub fn rows(&self) -> Option<RowLayout> {
        let (&[tokens, heads, channels], &[of_token, of_head, 1]) = (&self.shape[..], &self.strides[..]) else {
            return None;
        };
        let (token_stride, head_stride) = (usize::try_from(of_token).ok()?, usize::try_from(of_head).ok()?);
        let apart = |count: usize, stride: usize| count <= 1 || stride >= channels;
        let readable = self.elements() > 0 && apart(tokens, token_stride) && apart(heads, head_stride);
        readable.then_some(RowLayout { tokens, token_stride, head_stride })
    }

    /// Whether memory of a contiguous tensor may be memory of another.
    pub fn overlaps(&self, other: &Self) -> bool {
        let bytes = |view: &Self| view.elements().saturating_mul(view.element.bytes());
        let behind = |view: &Self| view.address.saturating_add(bytes(view));
        !other.is_contiguous() || (self.address < behind(other) && other.address < behind(self))
    }

    /// The output of these queries: the caller's tensor, or a new one like them. It has their shape and device, is
    /// writable and contiguous.
    pub fn output<'py>(
        &self,
        queries: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<(Bound<'py, PyAny>, Self)> {
        let out = match out {
            Some(out) => out,
            None if self.of_torch && self.is_contiguous() => Torch::empty_like(queries)?,
            None => new_like(queries, self.place, &self.shape, self.element)?,
        };
        let to = Self::of("out", &out, stream)?;
        to.check_place("out", self.place)?;
        if to.read_only {
            return Err(wrong_tensor("out", "it is read-only"));
        }
        if !to.is_contiguous() {
            return Err(wrong_tensor("out", format!("its strides are {:?}; it must be contiguous", to.strides)));
        }
        if to.shape != self.shape {
            let reason = format!("its shape is {:?}; it must be that of the queries, {:?}", to.shape, self.shape);
            return Err(wrong_tensor("out", reason));
        }
        Ok((out, to))
    }

    /// Calls `each` with the address and the number of elements of every run of contiguous elements, in the order of
    /// the dimensions.
    pub fn runs(&self, mut each: impl FnMut(usize, usize)) {
        if self.elements() == 0 {
            return;
        }
        let size = self.element.bytes() as isize;
        // The last dimensions that lie together.
        let mut run = 1;
        let mut outer = self.shape.len();
        while outer > 0 && (self.shape[outer - 1] == 1 || self.strides[outer - 1] == run as isize) {
            run *= self.shape[outer - 1];
            outer -= 1;
        }
        let mut place = vec![0; outer];
        loop {
            let offset: isize = place.iter().zip(&self.strides).map(|(&at, &stride)| at as isize * stride).sum();
            each(self.address.wrapping_add_signed(offset * size), run);
            let mut dimension = outer;
            loop {
                if dimension == 0 {
                    return;
                }
                dimension -= 1;
                place[dimension] += 1;
                if place[dimension] < self.shape[dimension] {
                    break;
                }
                place[dimension] = 0;
            }
        }
    }
}

/// Strides of a tensor whose elements lie one after the other.
pub fn contiguous(shape: &[usize]) -> Dimensions<isize> {
    let mut strides: Dimensions<isize> = smallvec![1; shape.len()];
    for dimension in (1..shape.len()).rev() {
        strides[dimension - 1] = strides[dimension].saturating_mul(shape[dimension].max(1) as isize);
    }
    strides
}

fn in_elements(what: &str, bytes: &[isize], element: ElementType) -> PyResult<Dimensions<isize>> {
    let size = element.bytes() as isize;
    if bytes.iter().any(|stride| stride % size != 0) {
        return Err(wrong_tensor(
            what,
            format!("its strides {bytes:?} are no multiples of {size}, the bytes of an element"),
        ));
    }
    Ok(bytes.iter().map(|stride| stride / size).collect())
}

/// The exception for elements of another type.
pub fn wrong_type(what: &str, given: &str) -> PyErr {
    wrong_tensor(what, format!("its elements are {given}; use float32, float16 or bfloat16"))
}

const NO_ARRAYS: &str =
    "kvpack makes tensors on CUDA with PyTorch alone; pass tensors of PyTorch, or out= where the call takes it";

/// A new contiguous tensor on this device: PyTorch's like a tensor of PyTorch, and NumPy's like any other.
pub fn new_like<'py>(
    like: &Bound<'py, PyAny>,
    place: Place,
    shape: &[usize],
    element: ElementType,
) -> PyResult<Bound<'py, PyAny>> {
    let py = like.py();
    if let Some(torch) = Torch::imported(py).filter(|torch| torch.has(like)) {
        let keywords = PyDict::new(py);
        keywords.set_item(intern!(py, "dtype"), torch.name_of(element))?;
        return like.call_method(intern!(py, "new_empty"), (PyTuple::new(py, shape)?,), Some(&keywords));
    }
    let refuse = |reason| Err(wrong_tensor("out", reason));
    let name = match (place, element) {
        (Place::Cuda(_), _) => return refuse(NO_ARRAYS),
        (Place::Cpu, ElementType::Bf16) => return refuse("NumPy has no bfloat16; pass out= for the result"),
        (Place::Cpu, ElementType::F32) => "float32",
        (Place::Cpu, ElementType::F16) => "float16",
    };
    py.import("numpy")?.call_method1("empty", (shape.to_vec(), name))
}
