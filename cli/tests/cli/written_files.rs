//! Files that commands write: links, devices, permissions, names, full disks.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{MODEL, Run, SCRATCH, kvpack};

const DUMP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/dump/escape.safetensors");

/// A new directory.
fn directory(name: &str) -> PathBuf {
    let path = Path::new(SCRATCH).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn capture(output: &Path) -> Run {
    kvpack(&["capture", "--model", MODEL, "--tokens", "4", "--queries", "2", text(output)])
}

fn report(path: &Path) -> Run {
    kvpack(&["eval", "--backend", "cpu", "--format", "f16", "--report", text(path), DUMP])
}

fn files(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn links_stay_links() {
    let directory = directory("links");
    let (dump, link) = (directory.join("dump"), directory.join("link"));
    symlink("dump", &link).unwrap();
    let run = capture(&link);
    assert_eq!(run.code, 0, "{}", run.err);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(dump.is_file());
    assert_eq!(files(&directory), ["dump", "link"]);
}

#[test]
fn permissions_are_those_of_the_umask() {
    let directory = directory("umask");
    let (dump, plain) = (directory.join("dump"), directory.join("plain"));
    assert_eq!(capture(&dump).code, 0);
    fs::write(&plain, "").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&dump), mode(&plain));
    // And those of a file that is there stay.
    fs::set_permissions(&dump, fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(capture(&dump).code, 0);
    assert_eq!(mode(&dump) & 0o777, 0o640);
}

#[test]
fn devices_and_directories_are_refused_before_the_work() {
    let directory = directory("devices");
    let missing = Path::new("/no/such/directory/dump");
    // PATH.json is what a report writes.
    let link = directory.join("run");
    symlink("/dev/full", directory.join("run.json")).unwrap();
    let captures = [Path::new("/dev/full"), Path::new("/dev/null"), &directory, missing].map(capture);
    for run in captures.into_iter().chain([&link, missing].map(report)) {
        assert_eq!(run.code, 2, "{}", run.out);
        assert!(run.err.contains("cannot write") && run.out.is_empty(), "{}", run.err);
    }
    for device in ["/dev/full", "/dev/null"] {
        assert!(fs::symlink_metadata(device).unwrap().file_type().is_char_device());
    }
}

/// A process that is killed while it works leaves no file.
#[test]
fn a_killed_command_leaves_nothing() {
    let directory = directory("killed");
    let dump = directory.join("dump");
    let text = directory.join("text");
    fs::write(&text, "word ".repeat(40_000)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpack"));
    let arguments = ["capture", "--model", MODEL, "--tokens", "4", "--queries", "2", "--text"];
    let mut child = command.args(arguments).arg(&text).arg(&dump).spawn().unwrap();
    // Whether it is killed before or after the dump is there, nothing else is.
    std::thread::sleep(std::time::Duration::from_millis(30));
    child.kill().unwrap();
    child.wait().unwrap();
    let left = files(&directory);
    assert!(left.iter().all(|name| name == "dump" || name == "text"), "{left:?}");
}

#[test]
fn captures_of_the_same_are_the_same() {
    let directory = directory("same");
    let dumps = ["a", "b", "c"].map(|name| directory.join(name));
    dumps.iter().for_each(|dump| assert_eq!(capture(dump).code, 0));
    let [a, b, c] = dumps.map(|dump| fs::read(dump).unwrap());
    assert!(a == b && b == c);
}

#[test]
fn outputs_do_not_replace_what_is_read() {
    let directory = directory("inputs");
    let path = directory.join("run");
    assert_eq!(report(&path).code, 0);
    let json = directory.join("run.json");
    let run = kvpack(&["compare", text(&json), "--out", text(&json)]);
    assert_eq!(run.code, 2, "{}", run.out);
    assert!(run.err.contains("name another file"), "{}", run.err);
    let dump = directory.join("dump.json");
    fs::copy(DUMP, &dump).unwrap();
    let run = kvpack(&["eval", "--backend", "cpu", "--report", text(&directory.join("dump")), text(&dump)]);
    assert_eq!(run.code, 2, "{}", run.out);
    assert!(run.err.contains("name another file"), "{}", run.err);
    // A text, and folders of a model and of an encoder.
    let with = |option: &str, value: &Path, report: &Path| {
        let given = ["--model", MODEL, "--documents", "1", option, text(value), "--report", text(report)];
        kvpack(&[&["eval", "--backend", "cpu", "--recipes", "cocktail"][..], &given].concat())
    };
    let encoder = PathBuf::from(format!("minilm:{}", text(&directory)));
    for run in [
        with("--text", &dump, &directory.join("dump")),
        with("--rank-by", &encoder, &directory.join("run")),
        kvpack(&["eval", "--model", text(&directory), "--report", text(&directory.join("config"))]),
        kvpack(&["capture", "--model", text(&directory), text(&directory.join("model.gguf"))]),
    ] {
        assert_eq!(run.code, 2, "{}", run.out);
        assert!(run.err.contains("name another file") || run.err.contains("outside of it"), "{}", run.err);
    }
    for path in [directory.as_path().join("."), directory.as_path().join("")] {
        let run = report(&path);
        assert!(run.code == 2 && run.err.contains("name the files"), "{}", run.err);
    }
    assert_eq!(files(&directory), ["dump.json", "run.html", "run.json"]);
}

/// What is no report is said once, without the name of a temporary file.
#[test]
fn messages_say_a_reason_once() {
    let directory = directory("reasons");
    let notes = directory.join("notes.md");
    fs::write(&notes, "# no report").unwrap();
    let run = kvpack(&["compare", text(&notes)]);
    assert_eq!(run.code, 2);
    assert_eq!(run.err.matches("line 1").count(), 1, "{}", run.err);
    let run = kvpack(&["compare", DUMP, "--out", "/no/such/directory/page.html"]);
    assert!(!run.err.contains(".kvpack-"), "{}", run.err);
}

#[test]
fn reports_keep_their_names_and_leave_others_alone() {
    let directory = directory("reports");
    fs::write(directory.join("run.tmp"), "mine").unwrap();
    fs::write(directory.join("run.1.tmp"), "mine").unwrap();
    for name in ["run.1", "run.2"] {
        let run = report(&directory.join(name));
        assert_eq!(run.code, 0, "{}", run.err);
    }
    let written = ["run.1.html", "run.1.json", "run.1.tmp", "run.2.html", "run.2.json", "run.tmp"];
    assert_eq!(files(&directory), written);
    assert_eq!(fs::read_to_string(directory.join("run.tmp")).unwrap(), "mine");
}

/// Neither file changes when one of them cannot be written.
#[test]
fn reports_are_written_both_or_not_at_all() {
    let directory = directory("both");
    let path = directory.join("run");
    assert_eq!(report(&path).code, 0);
    fs::write(directory.join("run.json"), "old").unwrap();
    fs::remove_file(directory.join("run.html")).unwrap();
    fs::create_dir(directory.join("run.html")).unwrap();
    let run = report(&path);
    assert_eq!(run.code, 2);
    assert!(run.err.contains("run.html"), "{}", run.err);
    assert_eq!(fs::read_to_string(directory.join("run.json")).unwrap(), "old");
    assert_eq!(files(&directory), ["run.html", "run.json"]);
}

/// A disk that fills up between the two files of a report: the old pair stays, and the result is printed all the same.
#[test]
fn a_full_disk_keeps_both_old_files_and_prints_the_result() {
    let directory = directory("full");
    let path = directory.join("run");
    let model = ["eval", "--model", MODEL, "--recipes", "f16", "--lengths", "5", "--passkey-tokens", "0"];
    let dump = ["eval", "--format", "f16", DUMP];
    for arguments in [dump.as_slice(), &model] {
        for name in ["run.json", "run.html"] {
            fs::write(directory.join(name), "old").unwrap();
        }
        // Files grow to 4 or 8 KB, as the shell counts: enough for the JSON, too little for the page.
        let limited = "ulimit -f 8; trap '' XFSZ; exec \"$0\" \"$@\" --backend cpu --report \"$REPORT\"";
        let mut command = Command::new("sh");
        command.args(["-c", limited, env!("CARGO_BIN_EXE_kvpack")]).args(arguments).env("REPORT", &path);
        let output = command.output().unwrap();
        let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(err.contains("run.html") && err.contains("File too large"), "{err}");
        assert!(out.contains("f16"), "{out}");
        assert_eq!(files(&directory), ["run.html", "run.json"]);
        for name in ["run.json", "run.html"] {
            assert_eq!(fs::read_to_string(directory.join(name)).unwrap(), "old", "{name}");
        }
    }
}
