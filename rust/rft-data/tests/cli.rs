//! The command line without Python: what it says of a set that is whole, and of one that is not.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use rft_core::store::{Begun, Document, Layout, Writer};
use serde_json::{Value, json};

fn run(arguments: &[&str]) -> (u8, String, String) {
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_string()).collect();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = rft_data::run("rft-data", &arguments, &mut out, &mut err, &|| Ok(()));
    (code, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
}

fn make(place: &Path) {
    let layout = Layout {
        key: place.file_name().unwrap().to_str().unwrap().into(),
        vocab_size: 300,
        tokenizer: 1,
        template: 0,
        unicode: "16.0.0".into(),
        shard_bytes: 100,
    };
    let Begun::Write(mut writer, _) = Writer::begin(place, layout, &mut || Ok(())).unwrap() else {
        panic!("it is new")
    };
    for line in 1..=20 {
        let ids: Vec<u32> = (0..line as u32).collect();
        writer.push(&Document { ids: &ids, trained: &[[0, 1]], weights: None, source: 0, line }).unwrap();
        if writer.is_full() {
            writer.cut(json!(line)).unwrap();
        }
    }
    writer.finish(Vec::new(), json!({}), json!({})).unwrap();
}

#[test]
fn a_set_is_listed_verified_exported_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_str().unwrap();
    let place = folder.path().join("0".repeat(32));
    make(&place);
    let (code, out, _) = run(&["ls", "--store", root, "--json"]);
    let told: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &told[0]["documents"], &told[0]["state"]), (0, &json!(20), &json!("complete")));
    assert_eq!(run(&["verify", "00", "--store", root]).0, 0);
    for ending in ["parquet", "arrow"] {
        let file = folder.path().join("out").with_extension(ending);
        let (code, out, err) = run(&["export", place.to_str().unwrap(), "--to", file.to_str().unwrap()]);
        assert!(code == 0 && out.contains("20 documents") && file.exists(), "{err}");
    }
    let shard = place.join("data-00001.rft");
    let mut bytes = fs::read(&shard).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&shard, bytes).unwrap();
    let (code, out, _) = run(&["verify", "--store", root]);
    assert!(code == 1 && out.contains("data-00001.rft: "), "{out}");
    let (code, out, _) = run(&["prune", "00", "--store", root]);
    assert!(code == 0 && out.contains("removed 1,") && !place.exists(), "{out}");
}

#[test]
fn what_is_named_or_of_no_use_makes_room_before_the_others_do() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_str().unwrap();
    let places: Vec<_> = (0..3).map(|digit| folder.path().join(digit.to_string().repeat(32))).collect();
    for (place, days) in places.iter().zip([3, 2, 1]) {
        make(place);
        let used = std::time::SystemTime::now() - std::time::Duration::from_secs(days * 24 * 3600);
        fs::File::open(place).unwrap().set_modified(used).unwrap();
    }
    let stray = folder.path().join("notes.tmp-1");
    fs::write(&stray, b"left").unwrap();
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(2 * 24 * 3600);
    fs::File::open(&stray).unwrap().set_modified(old).unwrap();
    let bytes: u64 = fs::read_dir(&places[0]).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    // Two of three fit: the one that is named is enough, though it is not the oldest.
    let (code, out, err) = run(&["prune", "11", "--store", root, "--max-size", &(2 * bytes + 10).to_string()]);
    assert!(code == 0 && out.contains("removed 2,"), "{out}{err}");
    assert_eq!(places.iter().map(|place| place.exists()).collect::<Vec<_>>(), [true, false, true]);
    assert!(!stray.exists());
    let (_, out, _) = run(&["prune", "--store", root, "--max-size", &bytes.to_string()]);
    assert!(out.contains("over --max-size"), "{out}");
    assert_eq!(places.iter().map(|place| place.exists()).collect::<Vec<_>>(), [false, false, true], "the oldest goes");
}

#[test]
fn a_name_that_would_drive_the_terminal_is_shown_as_numbers() {
    let (code, out, err) = run(&["verify", "\u{1b}[2Jnone", "--store", "/"]);
    assert!(code == 2 && err.contains("\\x1b[2Jnone") && !(out + &err).contains('\u{1b}'), "{err}");
}

#[test]
fn help_calls_the_program_by_its_name() {
    let (code, out, _) = run(&["--help"]);
    assert!(code == 0 && out.contains("Usage: rft-data <COMMAND>"), "{out}");
    assert_eq!(run(&["--version"]).1, format!("rft-data {}\n", env!("CARGO_PKG_VERSION")));
}
