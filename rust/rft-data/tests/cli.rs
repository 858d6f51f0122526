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
        writer.push(&Document { ids: &ids, trained: &[[0, line as u32]], weights: None, source: 0, line }).unwrap();
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
fn a_set_is_packed_and_told() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("0".repeat(32));
    make(&place);
    let set = place.to_str().unwrap();
    let file = folder.path().join("packs.parquet");
    let (code, out, err) = run(&["pack", set, "--seq-len", "16", "--to", file.to_str().unwrap(), "--json"]);
    let told: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{err}"));
    // 1 to 20 tokens each; of those over 16 the rest becomes a piece, that of 17 one without a label.
    assert_eq!((code, &told["tokens"], &told["split_documents"]), (0, &json!(210 - 1), &json!(4)));
    assert!(file.exists() && told["packs"].as_u64().unwrap() >= 14);
    assert_eq!(run(&["pack", set, "--seq-len", "16", "--to", file.to_str().unwrap()]).0, 2, "it is there already");
    let (code, out, _) = run(&["stats", set, "--seq-len", "32"]);
    assert!(code == 0 && out.starts_with("20 documents, 210 tokens, 100.0 % trained\n"), "{out}");
    let (code, out, _) = run(&["completions", "bash"]);
    assert!(code == 0 && out.contains("rft-data") && out.contains("prepare"));
}

#[test]
fn a_config_is_read_without_python_and_what_is_not_read_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("chat.toml");
    fs::write(&file, "[model]\npath = \"m\"\nattention = \"sdpa\"\n[[data.train]]\npath = \"a\"\n[optim]\nlr = 1")
        .unwrap();
    let name = file.to_str().unwrap();
    let (code, out, err) = run(&["config", name, "--set", "data.train.0.weight=2.0", "--set", "train.seed=7"]);
    assert!(code == 0 && out.contains("weight = 2.0") && out.contains("seed = 7"), "{out}{err}");
    assert!(err.trim_end().ends_with(": model.attention, [optim]"), "{err}");
    for (wrong, told) in
        [("data.packing=tight", "stream, bfd"), ("data.train.3.weight=1", "no table"), ("data.seq_len=1", "2^24")]
    {
        let (code, _, err) = run(&["config", name, "--set", wrong]);
        assert!(code == 2 && err.contains(told), "{wrong}: {err}");
    }
}

#[test]
fn help_calls_the_program_by_its_name() {
    let (code, out, _) = run(&["--help"]);
    assert!(code == 0 && out.contains("Usage: rft-data <COMMAND>"), "{out}");
    assert_eq!(run(&["--version"]).1, format!("rft-data {}\n", env!("CARGO_PKG_VERSION")));
}
