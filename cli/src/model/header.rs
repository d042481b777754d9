//! What must be known of the header of a GGUF file before candle reads it: that it stays within bounds, and that its
//! alignment can be divided by.
//!
//! A header is `GGUF`, a version, the numbers of tensors and of entries, then the entries: a key, a type
//! and a value each.

use std::io::{self, Read, Seek, SeekFrom};

/// Values of all entries together, those in arrays included: candle takes 32 bytes for each, however small it is in the
/// file. The largest vocabularies have about 300,000 tokens, with as many kinds and merges.
const MOST_VALUES: u64 = 1 << 24;

/// Bytes of all entries together.
const MOST_BYTES: u64 = 1 << 28;

/// Arrays within arrays; no entry that is known has any.
const DEEPEST: usize = 4;

/// The key of the alignment of the tensors.
const ALIGNMENT: &str = "general.alignment";

/// Checks the entries of a file from its beginning, where the reader is left.
///
/// # Errors
/// What is wrong, as an error of the kind `InvalidData`; or that the file ends too early.
pub fn check(reader: &mut (impl Read + Seek)) -> io::Result<()> {
    reader.seek(SeekFrom::Start(0))?;
    Header { reader: &mut *reader, wide: true, values: 0 }.check()?;
    reader.seek(SeekFrom::Start(0)).map(drop)
}

struct Header<'a, R> {
    reader: &'a mut R,
    /// Lengths have 64 bits; 32 in version 1.
    wide: bool,
    /// Values so far.
    values: u64,
}

/// How a type of GGUF is stored.
enum Stored {
    Bytes(u64),
    String,
    Array,
}

impl<R: Read + Seek> Header<'_, R> {
    fn check(mut self) -> io::Result<()> {
        let magic = self.number::<4>()?;
        let version = self.number::<4>()?;
        if !self.known(magic, version) {
            return Ok(()); // candle says so
        }
        self.wide = version > 1;
        self.length()?; // of tensors
        for _ in 0..self.length()? {
            let key = self.string()?;
            let stored = self.stored()?;
            if key == ALIGNMENT.as_bytes() {
                self.check_alignment(stored)?;
            } else {
                self.skip(stored, 0)?;
            }
            if self.reader.stream_position()? > MOST_BYTES {
                return Err(invalid(format!("its metadata take more than {MOST_BYTES} bytes")));
            }
        }
        Ok(())
    }

    fn known(&self, magic: u64, version: u64) -> bool {
        [*b"GGUF", *b"FUGG"].map(u32::from_le_bytes).map(u64::from).contains(&magic) && (1..=3).contains(&version)
    }

    fn check_alignment(&mut self, stored: Stored) -> io::Result<()> {
        let alignment = match stored {
            Stored::Bytes(4) => self.number::<4>()?,
            _ => return Err(invalid(format!("{ALIGNMENT} is no 32-bit number"))),
        };
        if !(alignment as u32).is_power_of_two() {
            return Err(invalid(format!("{ALIGNMENT} is {alignment}; it must be a power of two")));
        }
        Ok(())
    }

    fn skip(&mut self, stored: Stored, depth: usize) -> io::Result<()> {
        self.count(1)?;
        match stored {
            Stored::Bytes(count) => self.skip_bytes(count),
            Stored::String => {
                let length = self.length()?;
                self.skip_bytes(length)
            }
            Stored::Array if depth == DEEPEST => {
                Err(invalid(format!("its metadata nest arrays deeper than {DEEPEST}")))
            }
            Stored::Array => {
                let element = self.number::<4>()?;
                let length = self.length()?;
                // Numbers are passed over in one go.
                if let Stored::Bytes(size) = stored_as(element)? {
                    self.count(length)?;
                    return self.skip_bytes(length.saturating_mul(size));
                }
                for _ in 0..length {
                    self.skip(stored_as(element)?, depth + 1)?;
                }
                Ok(())
            }
        }
    }

    fn count(&mut self, values: u64) -> io::Result<()> {
        self.values = self.values.saturating_add(values);
        if self.values > MOST_VALUES {
            return Err(invalid(format!("its metadata hold more than {MOST_VALUES} values")));
        }
        Ok(())
    }

    /// The bytes of a key, which are in the way and so read rather than skipped.
    fn string(&mut self) -> io::Result<Vec<u8>> {
        let length = self.length()?;
        let mut bytes = Vec::new();
        (&mut *self.reader).take(length.min(MOST_BYTES)).read_to_end(&mut bytes)?;
        if (bytes.len() as u64) < length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(bytes)
    }

    fn skip_bytes(&mut self, count: u64) -> io::Result<()> {
        let skipped = io::copy(&mut (&mut *self.reader).take(count), &mut io::sink())?;
        if skipped < count { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    fn stored(&mut self) -> io::Result<Stored> {
        stored_as(self.number::<4>()?)
    }

    fn length(&mut self) -> io::Result<u64> {
        if self.wide { self.number::<8>() } else { self.number::<4>() }
    }

    fn number<const BYTES: usize>(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.reader.read_exact(&mut bytes[..BYTES])?;
        Ok(u64::from_le_bytes(bytes))
    }
}

fn stored_as(code: u64) -> io::Result<Stored> {
    Ok(match code {
        0 | 1 | 7 => Stored::Bytes(1),
        2 | 3 => Stored::Bytes(2),
        4..=6 => Stored::Bytes(4),
        8 => Stored::String,
        9 => Stored::Array,
        10..=12 => Stored::Bytes(8),
        other => return Err(invalid(format!("its metadata have a value of the unknown type {other}"))),
    })
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}
