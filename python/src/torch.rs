//! Tensors of PyTorch, read through DLPack's table of C functions where this PyTorch has one (2.10 and newer), or else
//! through their own attributes: a tenth of the time of `__dlpack__`, which is called in Python.

use kvpack::plan::ElementType;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::errors::wrong_tensor;
use crate::exchange::Exchange;
use crate::view::{Dimensions, Place, View, wrong_type};

/// What is looked up in PyTorch once.
pub struct Torch {
    tensor: Py<PyAny>,
    elements: [(Py<PyAny>, ElementType); 3],
    exchange: Option<Exchange>,
    empty_like: Py<PyAny>,
    /// The handle of the current stream of a device. Builds without CUDA have none.
    #[cfg(feature = "cuda")]
    current_stream: Option<Py<PyAny>>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

impl Torch {
    /// PyTorch, if the program has imported it.
    pub fn imported(py: Python<'_>) -> Option<&Self> {
        TORCH.get(py).or_else(|| {
            let modules = py.import("sys").ok()?.getattr("modules").ok()?;
            let torch = modules.get_item("torch").ok()?;
            // While it is being imported it lacks names.
            let found = Self::of_module(&torch).ok()?;
            Some(TORCH.get_or_init(py, || found))
        })
    }

    fn of_module(torch: &Bound<'_, PyAny>) -> PyResult<Self> {
        let named = |name: &str| torch.getattr(name).map(Bound::unbind);
        let elements = [
            (named("float16")?, ElementType::F16),
            (named("bfloat16")?, ElementType::Bf16),
            (named("float32")?, ElementType::F32),
        ];
        #[cfg(feature = "cuda")]
        let current_stream = torch.getattr("_C")?.getattr("_cuda_getCurrentRawStream").ok().map(Bound::unbind);
        let tensor = torch.getattr("Tensor")?;
        Ok(Self {
            exchange: Exchange::of(&tensor),
            empty_like: named("empty_like")?,
            tensor: tensor.unbind(),
            elements,
            #[cfg(feature = "cuda")]
            current_stream,
        })
    }

    /// Whether it is one of its tensors.
    pub fn has(&self, tensor: &Bound<'_, PyAny>) -> bool {
        tensor.is_instance(self.tensor.bind(tensor.py())).unwrap_or(false)
    }

    /// A new tensor of the shape and type of a contiguous one.
    pub fn empty_like<'py>(like: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        match Self::imported(like.py()) {
            Some(torch) => torch.empty_like.bind(like.py()).call1((like,)),
            None => like.call_method0("clone"),
        }
    }

    /// The type of elements, as PyTorch names it.
    pub fn name_of(&self, element: ElementType) -> Option<&Py<PyAny>> {
        self.elements.iter().find(|(_, of)| *of == element).map(|(name, _)| name)
    }

    /// The handle of the current stream of a CUDA device.
    #[cfg(feature = "cuda")]
    pub fn current_stream(&self, py: Python<'_>, ordinal: i32) -> Option<u64> {
        if let Some(stream) = self.exchange.as_ref().and_then(|exchange| exchange.current_stream(py, ordinal)) {
            return Some(stream);
        }
        self.current_stream.as_ref()?.bind(py).call1((ordinal,)).ok()?.extract().ok()
    }

    /// Whether the memory is what the tensor is.
    fn check(&self, what: &str, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = tensor.py();
        if tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
            let reason = "it requires a gradient, and kvpack computes none; call under torch.no_grad() or detach() it";
            return Err(wrong_tensor(what, reason));
        }
        if tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
            return Err(wrong_tensor(what, "it is a negative view; call resolve_neg() first"));
        }
        Ok(())
    }

    /// Where a tensor lies.
    pub fn view(&self, what: &str, tensor: &Bound<'_, PyAny>) -> PyResult<View> {
        let py = tensor.py();
        // A subclass may have its memory elsewhere.
        let exchange = self.exchange.as_ref().filter(|_| tensor.get_type().is(&self.tensor));
        if let Some(found) = exchange.and_then(|exchange| exchange.view(what, tensor)) {
            self.check(what, tensor)?;
            return Ok(View { of_torch: true, ..found });
        }
        self.check(what, tensor)?;
        let failed = |error: PyErr| wrong_tensor(what, format!("its memory cannot be read: {error}"));
        let given = tensor.getattr(intern!(py, "dtype"))?;
        let Some(&(_, element)) = self.elements.iter().find(|(name, _)| given.is(name)) else {
            return Err(wrong_type(what, &given.str()?.to_string()));
        };
        let place = if tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
            Place::Cuda(tensor.call_method0(intern!(py, "get_device"))?.extract()?)
        } else if tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
            Place::Cpu
        } else {
            let device = tensor.getattr(intern!(py, "device"))?.str()?.to_string();
            return Err(wrong_tensor(what, format!("it lies on {device}; use the CPU or CUDA")));
        };
        let strides = tensor.call_method0(intern!(py, "stride")).map_err(failed)?;
        let strides = numbers(&strides)?;
        let address: usize = tensor.call_method0(intern!(py, "data_ptr")).map_err(failed)?.extract()?;
        let shape = numbers(&tensor.getattr(intern!(py, "shape"))?)?;
        let owner = tensor.clone().unbind();
        Ok(View { address, shape, strides, element, place, read_only: false, of_torch: true, owner })
    }
}

/// The numbers of a tuple.
fn numbers<'py, T: FromPyObjectOwned<'py>>(tuple: &Bound<'py, PyAny>) -> PyResult<Dimensions<T>> {
    tuple.cast::<PyTuple>()?.iter().map(|number| number.extract().map_err(Into::into)).collect()
}
