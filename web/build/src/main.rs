//! Makes the folder of the page and serves it.
//!
//! ```text
//! kvpack-web-build WASM FOLDER     writes the page with the JavaScript of the wasm file
//! kvpack-web-build serve FOLDER    serves it on the loopback address and prints the link
//! ```

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use tiny_http::{Header, Request, Response, Server};
use wasm_bindgen_cli_support::Bindgen;

/// What the page consists of, beside the wasm and its JavaScript.
const FILES: [&str; 5] =
    ["web/index.html", "web/page.css", "web/page.js", "web/plot.js", "data/smollm2_kv.safetensors"];

/// The first of some ports that may be in use.
const PORT: u16 = 8017;
const PORTS: u16 = 20;

fn main() -> Result<()> {
    let arguments: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    match arguments.as_slice() {
        [serve, folder] if serve.as_os_str() == "serve" => serve_folder(folder),
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

fn serve_folder(folder: &Path) -> Result<()> {
    let server = (PORT..PORT + PORTS).find_map(|port| Server::http(("127.0.0.1", port)).ok());
    let server = server.with_context(|| format!("the ports {PORT} to {} are in use", PORT + PORTS - 1))?;
    println!("http://{}/", server.server_addr());
    for request in server.incoming_requests() {
        // A browser that hangs up is no reason to stop.
        if let Err(error) = answer(request, folder) {
            eprintln!("{error}");
        }
    }
    Ok(())
}

/// Answers with the file of this name; the page has no folders.
fn answer(request: Request, folder: &Path) -> Result<()> {
    let path = request.url().split('?').next().unwrap_or_default();
    let name = match path.trim_start_matches('/') {
        "" => "index.html",
        name => name,
    };
    let known = !name.contains(['/', '\\', '%']) && !name.starts_with('.');
    let Some(file) = known.then(|| File::open(folder.join(name)).ok()).flatten() else {
        return Ok(request.respond(Response::from_string("not found").with_status_code(404))?);
    };
    let kind = match Path::new(name).extension().and_then(|extension| extension.to_str()) {
        Some("html") => "text/html; charset=utf-8",
        Some("css") => "text/css",
        Some("js") => "text/javascript",
        Some("wasm") => "application/wasm",
        _ => "application/octet-stream",
    };
    let header = Header::from_bytes("Content-Type", kind).map_err(|()| anyhow!("no header for {kind}"))?;
    Ok(request.respond(Response::from_file(file).with_header(header))?)
}
