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
        key: "0".repeat(32),
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
fn help_calls_the_program_by_its_name() {
    let (code, out, _) = run(&["--help"]);
    assert!(code == 0 && out.contains("Usage: rft-data <COMMAND>"), "{out}");
    assert_eq!(run(&["--version"]).1, format!("rft-data {}\n", env!("CARGO_PKG_VERSION")));
}
