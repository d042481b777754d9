//! Makes the folder of the page and serves it.
//!
//! ```text
//! kvpack-web-build WASM FOLDER     writes the page with the JavaScript of the wasm file
//! kvpack-web-build serve FOLDER    serves it on the loopback address and prints the link
//! ```

mod serve;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use wasm_bindgen_cli_support::Bindgen;

/// The files of the page, in addition to the wasm and its JavaScript.
const FILES: [&str; 5] =
    ["web/index.html", "web/page.css", "web/page.js", "web/plot.js", "cli/data/smollm2_kv.safetensors"];

fn main() -> Result<()> {
    let arguments: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    match arguments.as_slice() {
        [serve, folder] if serve.as_os_str() == "serve" => serve::serve(folder),
        [wasm, folder] => write_folder(wasm, folder),
        _ => bail!("give a wasm file and the folder to write, or 'serve' and the folder"),
    }
}

fn write_folder(wasm: &Path, folder: &Path) -> Result<()> {
    let mut bindgen = Bindgen::new();
    bindgen.input_path(wasm).out_name("kvpack").typescript(true).omit_default_module_path(false).web(true)?;
    bindgen.generate(folder).with_context(|| format!("no JavaScript for {}", wasm.display()))?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for file in FILES {
        let name = Path::new(file).file_name().unwrap_or_default();
        fs::copy(root.join(file), folder.join(name)).with_context(|| format!("{file} could not be copied"))?;
    }
    Ok(())
}
