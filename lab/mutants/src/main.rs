//! Plants mistakes in a copy of kvpack's sources, every one behind a switch, so that one build has them all.
//!
//! ```text
//! planted SOURCES [WITHOUT [CONSTANT]]
//! ```
//!
//! SOURCES is the folder `src` of a copy of the library; its files in `cache`, `plan` and `policy` are changed in place.
//! WITHOUT is a file with the numbers of mistakes that do not compile, one a line. CONSTANT is one with the functions
//! that are called while compiling, `Type::function` or `function`. The list of all mistakes goes to standard output:
//! number, file, line, function, what is planted.
//!
//! The mistakes are those of cargo-mutants: another operator, a condition that is always or never so, an arm of a match
//! that is never taken, a field that is left out, a function that returns at once. A mistake is on where
//! `KVPACK_PLANTED` is its number. A switch cannot be asked while compiling, so constant functions are made ordinary
//! ones, but for those in CONSTANT. What the first runs had not has numbers from 5000.

mod mistakes;
mod values;

use std::{collections::HashSet, fs, path::Path};

use mistakes::Planter;
use syn::visit_mut::VisitMut;

/// The folders that mistakes are planted in.
const FOLDERS: [&str; 3] = ["cache", "plan", "policy"];

/// What the library gets: whether a mistake is on. Each first question is written to the file `KVPACK_REACHED`.
const SWITCH: &str = r#"
#[doc(hidden)]
pub(crate) mod planted {
    use std::{fs::File, io::Write, sync::{LazyLock, Mutex, atomic::{AtomicBool, Ordering}}};
    static ON: LazyLock<u32> =
        LazyLock::new(|| std::env::var("KVPACK_PLANTED").ok().and_then(|n| n.parse().ok()).unwrap_or(u32::MAX));
    static REACHED: LazyLock<Option<Mutex<File>>> =
        LazyLock::new(|| std::env::var_os("KVPACK_REACHED").map(|path| Mutex::new(File::create(path).unwrap())));
    static ASKED: [AtomicBool; 16384] = [const { AtomicBool::new(false) }; 16384];
    pub fn on(mistake: u32) -> bool {
        if !ASKED[mistake as usize].load(Ordering::Relaxed) && !ASKED[mistake as usize].swap(true, Ordering::Relaxed) {
            if let Some(file) = &*REACHED {
                writeln!(file.lock().unwrap(), "{mistake}").unwrap();
            }
        }
        *ON == mistake
    }
}
"#;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let sources = arguments.next().ok_or("which folder of sources?")?;
    let sources = Path::new(&sources);
    let without: HashSet<u32> = match arguments.next() {
        Some(file) => fs::read_to_string(file)?.lines().map(str::parse).collect::<Result<_, _>>()?,
        None => HashSet::new(),
    };
    let constant: HashSet<String> = match arguments.next() {
        Some(file) => fs::read_to_string(file)?.lines().map(String::from).collect(),
        None => HashSet::new(),
    };
    let mut planter = Planter::new(without, constant);
    for folder in FOLDERS {
        plant(&sources.join(folder), sources, &mut planter)?;
    }
    let root = sources.join("lib.rs");
    let text = fs::read_to_string(&root)?;
    fs::write(root, text + SWITCH)?;
    Ok(())
}

/// Plants in all files of a folder, in the order of their names.
fn plant(folder: &Path, sources: &Path, planter: &mut Planter) -> Result<(), Box<dyn std::error::Error>> {
    let mut paths: Vec<_> =
        fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            plant(&path, sources, planter)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let mut file = syn::parse_file(&fs::read_to_string(&path)?)?;
            planter.begin_file(&path.strip_prefix(sources)?.display().to_string());
            planter.visit_file_mut(&mut file);
            fs::write(&path, prettyplease::unparse(&file))?;
        }
    }
    Ok(())
}
