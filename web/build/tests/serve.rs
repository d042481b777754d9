//! The server of the page, and what clients may do to it.
#![cfg(unix)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(folder: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvpack-web-build"));
        let mut child = command.arg("serve").arg(folder).stdout(Stdio::piped()).spawn().unwrap();
        let mut link = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut link).unwrap();
        let address = link.trim().trim_start_matches("http://").trim_end_matches('/').to_owned();
        Self { child, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    /// The status line, the headers and the body.
    fn get(&self, path: &str) -> (String, String, Vec<u8>) {
        let mut stream = self.connect();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let end = answer.windows(4).position(|window| window == b"\r\n\r\n").expect("an answer");
        let head = String::from_utf8(answer[..end].to_vec()).unwrap();
        let (status, headers) = head.split_once("\r\n").unwrap();
        (status.into(), headers.to_lowercase(), answer[end + 4..].to_vec())
    }

    fn works(&self) {
        let (status, _, body) = self.get("/");
        assert!(status.contains("200") && body == b"<p>page", "{status}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("inner")).unwrap();
    fs::write(folder.join("index.html"), "<p>page").unwrap();
    fs::write(folder.join("kvpack_bg.wasm"), vec![7; 1 << 20]).unwrap();
    fs::write(folder.join("inner/index.html"), "inner").unwrap();
    folder
}

#[test]
fn files_have_their_types_and_nothing_else_is_served() {
    let folder = folder("serve-files");
    let secret = Path::new(env!("CARGO_TARGET_TMPDIR")).join("secret");
    fs::write(&secret, "secret").unwrap();
    std::os::unix::fs::symlink(&secret, folder.join("link")).unwrap();
    fs::write(folder.join(".hidden"), "hidden").unwrap();
    let server = Server::start(&folder);
    server.works();
    for (path, kind) in [("/", "text/html"), ("/index.html?x=y", "text/html"), ("/kvpack_bg.wasm", "application/wasm")]
    {
        let (status, headers, _) = server.get(path);
        assert!(status.contains("200") && headers.contains(&format!("content-type: {kind}")), "{path}: {headers}");
    }
    for path in
        ["/inner", "/inner/", "/inner/index.html", "/link", "/.hidden", "/../secret", "/%2e%2e/secret", "//etc/passwd"]
    {
        let (status, _, body) = server.get(path);
        assert!(status.contains("404"), "{path}: {status}");
        assert!(!body.windows(6).any(|window| window == b"secret"), "{path}");
    }
}

/// A request that announces a large body, one that is no HTTP, and a client that does not read: others are answered.
#[test]
fn one_client_does_not_stop_the_others() {
    let server = Server::start(&folder("serve-clients"));
    for request in [
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 18446744073709551615\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        "nonsense\r\n\r\n",
    ] {
        server.connect().write_all(request.as_bytes()).unwrap();
        server.works();
    }
    let silent: Vec<TcpStream> = (0..40).map(|_| server.connect()).collect();
    let slow: Vec<TcpStream> = (0..40)
        .map(|_| {
            let mut stream = server.connect();
            stream.write_all(b"GET /kvpack_bg.wasm HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
            stream
        })
        .collect();
    server.works();
    drop((silent, slow));
    server.works();
}
