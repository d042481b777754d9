//! Safetensors files: the header when a file is opened, each tensor when it is asked for.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::Value;

use super::config;
use crate::error::{Error, Result};
use crate::format::Table;

/// Bytes of the largest header.
const MOST_HEADER: u64 = 100_000_000;

/// A tensor file with its header.
pub struct TensorFile {
    name: String,
    content: Content,
    metadata: Metadata,
    /// Where the tensors begin.
    start: u64,
}

/// A file, and what it was when its header was read.
struct OnDisk {
    path: PathBuf,
    length: u64,
    modified: Option<SystemTime>,
}

/// Where the bytes are.
enum Content {
    /// On disk. It is opened for each tensor, so that threads may read at once.
    Disk(OnDisk),
    /// In memory.
    Memory(Vec<u8>),
}

/// A tensor that is not quantised.
#[derive(Clone, Debug, PartialEq)]
pub struct Dense {
    /// Its shape, outermost first.
    pub shape: Vec<usize>,
    /// Its elements in row-major order.
    pub values: Vec<f32>,
}

/// The tensor files of a folder, and which of them holds each tensor where an index tells.
pub struct Names {
    pub files: Vec<String>,
    pub index: Vec<(String, String)>,
}

/// The file that lists the tensor files of a checkpoint.
pub const INDEX: &str = "model.safetensors.index.json";

/// The tensor files of a checkpoint: those that its index names, or all of the folder.
pub fn names(folder: &Path, most: usize) -> Result<Names> {
    let index_file = folder.join(INDEX);
    let mut names = Names { files: Vec::new(), index: Vec::new() };
    if let Some(index) = config::json(&index_file)? {
        let wrong = |reason: String| Error::Config { what: index_file.display().to_string(), reason };
        let map = index["weight_map"].as_object();
        for (tensor, file) in map.ok_or_else(|| wrong("it has no object 'weight_map'".into()))? {
            let file = file.as_str().filter(|file| Path::new(file).file_name() == Some(file.as_ref()));
            let file = file.ok_or_else(|| wrong(format!("'{tensor}' names no file of the folder")))?;
            names.index.push((tensor.clone(), file.into()));
            names.files.push(file.into());
        }
    } else {
        names.files = in_folder(folder)?;
    }
    names.files.sort();
    names.files.dedup();
    if names.files.is_empty() || names.files.len() > most {
        let reason = format!("it has {} *.safetensors files; a checkpoint has 1 to {most}", names.files.len());
        return Err(Error::Config { what: folder.display().to_string(), reason });
    }
    Ok(names)
}

/// All tensor files of a folder.
pub fn in_folder(folder: &Path) -> Result<Vec<String>> {
    let io = |reason| Error::Io { path: folder.into(), reason };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        files.extend(name.filter(|name| name.ends_with(".safetensors")).map(str::to_owned));
    }
    Ok(files)
}

impl TensorFile {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |reason| Error::Io { path: path.into(), reason };
        let mut file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let name = path.display().to_string();
        let mut size = [0; 8];
        if length >= 8 {
            file.read_exact(&mut size).map_err(io)?;
        }
        let header = header_length(&name, u64::from_le_bytes(size), length)?;
        let mut bytes = vec![0; header];
        file.read_exact(&mut bytes).map_err(io)?;
        let modified = file.metadata().and_then(|of| of.modified()).ok();
        Self::new(name, Content::Disk(OnDisk { path: path.into(), length, modified }), &bytes, length)
    }

    /// Takes the bytes of a file.
    pub fn from_bytes(name: String, bytes: Vec<u8>) -> Result<Self> {
        let length = bytes.len() as u64;
        let size = bytes.first_chunk().map_or(0, |size| u64::from_le_bytes(*size));
        let header = header_length(&name, size, length)?;
        let bytes_of_header = bytes[8..8 + header].to_vec();
        Self::new(name, Content::Memory(bytes), &bytes_of_header, length)
    }

    fn new(name: String, content: Content, header: &[u8], length: u64) -> Result<Self> {
        let broken = |reason: String| Error::Safetensors { file: name.clone(), reason };
        // Reading it checks shapes, offsets and sizes against each other.
        let metadata: Metadata = serde_json::from_slice(header).map_err(|reason| broken(reason.to_string()))?;
        let start = 8 + header.len() as u64;
        let needed = start.saturating_add(metadata.data_len() as u64);
        if needed != length {
            return Err(broken(format!("its header needs {needed} bytes, it has {length}")));
        }
        Ok(Self { name, content, metadata, start })
    }

    /// Its name for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The names of its tensors.
    pub fn tensor_names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// Packed words: i32, or u32.
    pub fn words(&self, name: &str) -> Result<Table<u32>> {
        let info = self.info(name, &[Dtype::I32, Dtype::U32])?;
        let [rows, columns] = axes(name, info)?;
        let words = self.bytes(info)?.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect();
        Table::new(rows, columns, words)
    }

    /// Packed words of 16 bits: i16, or u16.
    pub fn shorts(&self, name: &str) -> Result<Table<u16>> {
        let info = self.info(name, &[Dtype::I16, Dtype::U16])?;
        let [rows, columns] = axes(name, info)?;
        let words = self.bytes(info)?.as_chunks().0.iter().map(|&bytes| u16::from_le_bytes(bytes)).collect();
        Table::new(rows, columns, words)
    }

    /// A list of indices.
    pub fn indices(&self, name: &str) -> Result<Vec<i32>> {
        let info = self.info(name, &[Dtype::I32])?;
        let [_] = axes(name, info)?;
        Ok(self.bytes(info)?.as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes)).collect())
    }

    /// Two integers: i64, or i32.
    pub fn pair(&self, name: &str) -> Result<[i64; 2]> {
        let info = self.info(name, &[Dtype::I64, Dtype::I32])?;
        let bytes = self.bytes(info)?;
        let values: Vec<i64> = match info.dtype {
            Dtype::I64 => bytes.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect(),
            _ => bytes.as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes).into()).collect(),
        };
        let wrong = |_| Error::Tensor { name: name.into(), reason: format!("it has the shape {:?}; [2]", info.shape) };
        values.try_into().map_err(wrong)
    }

    /// Floats of two axes.
    pub fn table(&self, name: &str) -> Result<Table<f32>> {
        let info = self.info(name, &[Dtype::F16, Dtype::BF16, Dtype::F32])?;
        let [rows, columns] = axes(name, info)?;
        Table::new(rows, columns, self.floats(info)?)
    }

    /// Floats of any shape.
    pub fn dense(&self, name: &str) -> Result<Dense> {
        let info = self.info(name, &[Dtype::F16, Dtype::BF16, Dtype::F32])?;
        Ok(Dense { shape: info.shape.clone(), values: self.floats(info)? })
    }

    fn info(&self, name: &str, types: &[Dtype]) -> Result<&TensorInfo> {
        let wrong = |reason: String| Error::Tensor { name: name.into(), reason };
        let info = self.metadata.info(name).ok_or_else(|| wrong(format!("{} does not hold it", self.name)))?;
        if types.contains(&info.dtype) {
            return Ok(info);
        }
        Err(wrong(format!("its type is {:?}; {types:?} can be read", info.dtype)))
    }

    fn floats(&self, info: &TensorInfo) -> Result<Vec<f32>> {
        let bytes = self.bytes(info)?;
        Ok(match info.dtype {
            Dtype::F16 => bytes.as_chunks().0.iter().map(|&bytes| f16::from_le_bytes(bytes).into()).collect(),
            Dtype::BF16 => bytes.as_chunks().0.iter().map(|&bytes| bf16::from_le_bytes(bytes).into()).collect(),
            _ => bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
        })
    }

    /// The bytes of a tensor. The header was checked, so they are in the file and no more than it has.
    fn bytes(&self, info: &TensorInfo) -> Result<Vec<u8>> {
        let (from, to) = info.data_offsets;
        let start = self.start + from as u64;
        match &self.content {
            Content::Memory(bytes) => Ok(bytes[start as usize..][..to - from].to_vec()),
            Content::Disk(OnDisk { path, length, modified }) => {
                let read = || -> io::Result<Vec<u8>> {
                    let mut file = File::open(path)?;
                    let found = file.metadata()?;
                    if found.len() != *length || found.modified().ok() != *modified {
                        return Err(io::Error::other("it changed since the checkpoint was opened; open that again"));
                    }
                    file.seek(SeekFrom::Start(start))?;
                    let mut bytes = vec![0; to - from];
                    file.read_exact(&mut bytes)?;
                    Ok(bytes)
                };
                read().map_err(|reason| Error::Io { path: path.clone(), reason })
            }
        }
    }
}

/// Bytes of the header, which must lie in the file.
fn header_length(name: &str, given: u64, length: u64) -> Result<usize> {
    let broken = |reason: String| Err(Error::Safetensors { file: name.into(), reason });
    if length < 8 {
        return broken(format!("it has {length} bytes"));
    }
    if given > MOST_HEADER || given > length - 8 {
        return broken(format!("its header has {given} bytes, the file {length}; allowed are {MOST_HEADER}"));
    }
    // At most MOST_HEADER.
    Ok(given as usize)
}

/// The shape of a tensor. A tensor with another number of axes is refused.
fn axes<const N: usize>(name: &str, info: &TensorInfo) -> Result<[usize; N]> {
    let wrong = |_| {
        let reason = format!("its shape is {:?}; it needs {N} axes", info.shape);
        Error::Tensor { name: name.into(), reason }
    };
    info.shape.as_slice().try_into().map_err(wrong)
}

/// A JSON file; `None` where there is none.
pub fn read_json(path: &Path, most: u64) -> Result<Option<Value>> {
    let io = |reason| Error::Io { path: path.into(), reason };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(error)),
    };
    let mut text = Vec::new();
    file.take(most + 1).read_to_end(&mut text).map_err(io)?;
    let wrong = |reason: String| Error::Config { what: path.display().to_string(), reason };
    if text.len() as u64 > most {
        return Err(wrong(format!("it is larger than {most} bytes")));
    }
    serde_json::from_slice(&text).map(Some).map_err(|reason| wrong(format!("it is no JSON: {reason}")))
}
