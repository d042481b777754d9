//! The files that users name: read within bounds, written whole or not at all.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use tempfile::NamedTempFile;

/// Opens a regular file, or one that a link leads to. A device or a pipe might never end.
///
/// # Errors
/// The operating system's reason, or that it is no regular file.
pub fn open(path: &Path) -> io::Result<File> {
    // Opening a pipe waits for its writer, so look first.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is a directory, a device or a pipe; name a regular file"));
    }
    File::open(path)
}

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
/// Those of [`open`], and that it is larger or does not fit into memory.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let length = file.metadata()?.len();
    let mut bytes = Vec::new();
    // The file may grow meanwhile, and some file systems tell no length at all.
    if length <= most {
        bytes.try_reserve_exact(length as usize)?;
        file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    }
    match length.max(bytes.len() as u64) {
        given if given > most => Err(io::Error::other(format!("it has {given} bytes, at most {most} are read"))),
        _ => Ok(bytes),
    }
}

/// Refuses an output that is one of the inputs of the same command, or lies directly in an input that is a folder.
///
/// # Errors
/// Which of them it would replace.
pub fn check_apart<'a>(output: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<()> {
    // Whoever writes the output says what is wrong with its links.
    let Ok(target) = followed(output) else { return Ok(()) };
    let folder = fs::canonicalize(folder_of(&target)).ok();
    let target = fs::canonicalize(&target).ok();
    for input in inputs {
        let read = fs::canonicalize(input).ok();
        if read.is_some() && read == target {
            bail!("cannot write {}: this command reads {}; name another file", output.display(), input.display());
        }
        if read.is_some() && read == folder {
            bail!(
                "cannot write {}: this command reads the folder {}; name a file outside of it",
                output.display(),
                input.display()
            );
        }
    }
    Ok(())
}

/// The folder that a file is in.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A file to be written: new content that takes the place of the old one in a single step.
///
/// Links are followed. A new file gets the permissions that the umask leaves, an old one keeps its own. A replacement
/// that is dropped leaves everything as it was. There is a temporary file only from [`Replacement::write`] to
/// [`Replacement::commit`]: a process that is killed before leaves nothing.
pub struct Replacement {
    target: PathBuf,
    permissions: Option<Permissions>,
    /// Next to the target, so that it can be moved there.
    content: Option<NamedTempFile>,
}

impl Replacement {
    /// Tries whether `path` can be written, and begins to.
    ///
    /// # Errors
    /// That it is a device, a directory or a pipe, or the operating system's reason.
    pub fn new(path: &Path) -> Result<Self> {
        Self::begin(path).with_context(|| format!("cannot write {}", path.display()))
    }

    fn begin(path: &Path) -> Result<Self> {
        let target = followed(path)?;
        let old = match fs::metadata(&target) {
            Ok(old) if !old.is_file() => {
                bail!("it is a directory, a device or a pipe; name a regular file or a new one")
            }
            Ok(old) => {
                OpenOptions::new().write(true).open(&target)?;
                Some(old.permissions())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error.into()),
        };
        let replacement = Self { target, permissions: old, content: None };
        // Whether the directory takes a file; it is gone at once.
        replacement.new_file().map(drop)?;
        Ok(replacement)
    }

    fn new_file(&self) -> io::Result<NamedTempFile> {
        let file = new_file(folder_of(&self.target)).map_err(without_temporary_name)?;
        if let Some(permissions) = &self.permissions {
            file.as_file().set_permissions(permissions.clone())?;
        }
        Ok(file)
    }

    /// Writes the content, to the disk itself.
    ///
    /// # Errors
    /// The operating system's reason.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.new_file().and_then(|mut file| {
            file.as_file_mut().write_all(bytes)?;
            file.as_file().sync_all()?;
            Ok(file)
        });
        self.content = Some(written.with_context(|| format!("cannot write {}", self.target.display()))?);
        Ok(())
    }

    /// Puts the content into its place; without any, the target stays as it was.
    ///
    /// # Errors
    /// The operating system's reason.
    pub fn commit(self) -> Result<()> {
        let Some(content) = self.content else { return Ok(()) };
        let placed = content.persist(&self.target).map_err(|failed| without_temporary_name(failed.error));
        placed.with_context(|| format!("cannot write {}", self.target.display())).map(drop)
    }
}

fn new_file(directory: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".kvpack-");
    #[cfg(unix)]
    // What the umask leaves of these, instead of the 0600 that suits a file nobody else is to see.
    let builder = builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(directory)
}

/// The reason alone: tempfile adds the name of the temporary file, which means nothing to whoever reads the message.
fn without_temporary_name(error: io::Error) -> io::Error {
    let text = error.to_string();
    match text.rsplit_once(" at path ") {
        Some((reason, _)) => io::Error::new(error.kind(), reason.to_owned()),
        None => error,
    }
}

/// Where the links that begin at `path` end; there need not be a file.
fn followed(path: &Path) -> io::Result<PathBuf> {
    /// As many as Linux follows.
    const MOST_LINKS: usize = 40;
    let mut path = path.to_path_buf();
    for _ in 0..MOST_LINKS {
        if !fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink()) {
            return Ok(path);
        }
        let next = fs::read_link(&path)?;
        path = path.parent().map_or(next.clone(), |parent| parent.join(next));
    }
    Err(io::Error::other("too many links lead to one another"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_hold() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ten");
        fs::write(&path, [7; 10]).unwrap();
        assert_eq!(read(&path, 10).unwrap(), [7; 10]);
        assert!(read(&path, 9).unwrap_err().to_string().contains("10 bytes, at most 9"));
        assert!(open(directory.path()).unwrap_err().to_string().contains("regular file"));
    }

    #[test]
    fn a_dropped_replacement_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "old").unwrap();
        let mut replacement = Replacement::new(&path).unwrap();
        replacement.write(b"new").unwrap();
        drop(replacement);
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        let mut replacement = Replacement::new(&path).unwrap();
        // What a process that is killed now would leave.
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        replacement.write(b"new").unwrap();
        replacement.commit().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn outputs_are_not_inputs() {
        let directory = tempfile::tempdir().unwrap();
        let input = directory.path().join("input");
        fs::write(&input, "").unwrap();
        let same = directory.path().join(".").join("input");
        let error = check_apart(&same, [input.as_path()]).unwrap_err().to_string();
        assert!(error.contains("name another file"), "{error}");
        assert!(check_apart(&directory.path().join("other"), [input.as_path()]).is_ok());
        // A folder that is read, whether its file is there or not; what lies deeper or next to it is free.
        let error = |path: &str| check_apart(&directory.path().join(path), [directory.path()]).err();
        fs::create_dir(directory.path().join("deeper")).unwrap();
        for path in ["input", "other"] {
            assert!(error(path).is_some_and(|error| error.to_string().contains("outside of it")), "{path}");
        }
        assert!(error("deeper/other").is_none() && error("../other").is_none());
    }

    #[test]
    fn messages_do_not_name_temporary_files() {
        let error = format!("{:#}", Replacement::new(Path::new("/no/such/directory/file")).err().unwrap());
        assert!(error.contains("/no/such/directory/file: ") && !error.contains(".kvpack-"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_permissions_kept() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let write = |path: &Path| {
            let mut replacement = Replacement::new(path).unwrap();
            replacement.write(b"new").unwrap();
            replacement.commit().unwrap();
        };
        // One link to a file that is there, and a chain to one that is not.
        fs::write(at("old"), "old").unwrap();
        fs::set_permissions(at("old"), fs::Permissions::from_mode(0o640)).unwrap();
        symlink("old", at("link")).unwrap();
        symlink("chain", at("first")).unwrap();
        symlink(at("created"), at("chain")).unwrap();
        write(&at("link"));
        write(&at("first"));
        for name in ["link", "first", "chain"] {
            assert!(fs::symlink_metadata(at(name)).unwrap().is_symlink(), "{name}");
        }
        for name in ["old", "created"] {
            assert_eq!(fs::read_to_string(at(name)).unwrap(), "new");
        }
        let mode = |name: &str| fs::metadata(at(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode("old"), 0o640);
        fs::write(at("by the umask"), "").unwrap();
        assert_eq!(mode("created"), mode("by the umask"));

        symlink("round", at("round")).unwrap();
        assert!(Replacement::new(&at("round")).is_err());
        for device in [Path::new("/dev/null"), directory.path()] {
            let error = format!("{:#}", Replacement::new(device).err().unwrap());
            assert!(error.contains("regular file"), "{error}");
        }
    }
}
