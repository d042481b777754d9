//! Serves the files of the page.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use axum::Router;
use tokio::net::TcpListener;
use tower_http::services::ServeFile;

/// The first port that is tried, and how many are.
const PORT: u16 = 8017;
const PORTS: u16 = 20;

/// Serves the folder on the loopback address until the process ends, and prints the link.
///
/// # Errors
/// When the folder holds no files, every port is in use, or the connection to the system is lost.
pub fn serve(folder: &Path) -> Result<()> {
    let files = files(folder)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_io().build()?;
    runtime.block_on(async {
        let listener = listen().await?;
        println!("http://{}/", listener.local_addr()?);
        Ok(axum::serve(listener, files).await?)
    })
}

/// A route for every regular file of the folder. The page has no folders, and a link may lead out of it: there is no
/// route to either.
fn files(folder: &Path) -> Result<Router> {
    let mut router = Router::new();
    let mut count = 0;
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // Braces would be a pattern, and names of the page need no escapes.
        let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) && !name.starts_with('.');
        if !plain || !entry.file_type()?.is_file() {
            continue;
        }
        if name == "index.html" {
            router = router.route_service("/", ServeFile::new(entry.path()));
        }
        router = router.route_service(&format!("/{name}"), ServeFile::new(entry.path()));
        count += 1;
    }
    ensure!(count > 0, "{} holds no files; `make web` writes the page", folder.display());
    Ok(router)
}

async fn listen() -> Result<TcpListener> {
    for port in PORT..PORT + PORTS {
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
            return Ok(listener);
        }
    }
    anyhow::bail!("the ports {PORT} to {} are in use", PORT + PORTS - 1)
}
