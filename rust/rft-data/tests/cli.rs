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
    make_with(place, json!({}));
}

fn make_with(place: &Path, counts: Value) {
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
        writer.push(&Document { ids: &ids, trained: &[[0, line as u32]], weights: None, source: 0, line }).unwrap();
        if writer.is_full() {
            writer.cut(json!(line)).unwrap();
        }
    }
    writer.finish(Vec::new(), counts, json!({})).unwrap();
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
    // 1 to 20 tokens each, all of them in some pack; those over 16 as two pieces.
    assert_eq!((code, &told["tokens"], &told["split_documents"]), (0, &json!(210), &json!(4)));
    assert!(file.exists() && told["packs"].as_u64().unwrap() >= 14);
    assert_eq!(run(&["pack", set, "--seq-len", "16", "--to", file.to_str().unwrap()]).0, 2, "it is there already");
    let (code, out, _) = run(&["stats", set, "--seq-len", "32"]);
    assert!(code == 0 && out.starts_with("20 documents, 210 tokens, 100.0 % trained\n"), "{out}");
    let (code, out, _) = run(&["completions", "bash"]);
    assert!(code == 0 && out.contains("rft-data") && out.contains("prepare"));
}

#[test]
fn tokens_are_told_by_data_set_and_role() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("0".repeat(32));
    let source = |set: u32, path: &str, tokens: u64, by_role: Value| {
        json!({"set": set, "path": path, "read": 5, "kept": 4, "tokens": tokens, "trained_tokens": 3,
               "tokens_by_role": by_role})
    };
    make_with(
        &place,
        json!({"sources": [
            source(0, "/a/one.jsonl", 60, json!({"user": 20, "assistant": 30, "template": 10})),
            source(0, "/a/two.jsonl", 100, json!({"system": 1, "user": 80, "tool": 4, "template": 15})),
            source(1, "/b/old.jsonl", 50, Value::Null),
        ]}),
    );
    let set = place.to_str().unwrap();
    let (code, out, err) = run(&["stats", set, "--seq-len", "32", "--json"]);
    let told: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{err}"));
    assert_eq!((code, told["sets"].as_array().unwrap().len()), (0, 2));
    assert_eq!(
        told["sets"][0],
        json!({"set": 0, "path": "/a/one.jsonl", "files": 2, "read": 10, "kept": 8, "tokens": 160, "trained_tokens": 6,
               "tokens_by_role": {"system": 1, "user": 100, "assistant": 30, "tool": 4, "template": 25}})
    );
    assert_eq!(told["sets"][1]["tokens_by_role"], Value::Null);
    let out = run(&["stats", set, "--seq-len", "32"]).1;
    let from = out.find("tokens of /a/one.jsonl and 1 more file\n").unwrap_or_else(|| panic!("{out}"));
    let lines: Vec<Vec<&str>> = out[from..].lines().skip(1).take(5).map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(lines[1], ["100", "62.5", "%", "user"]);
    assert_eq!(lines[4], ["25", "15.6", "%", "template"]);
    assert!(out.contains("tokens of /b/old.jsonl\n") && out.contains("not counted by role"), "{out}");
}

#[test]
fn what_is_no_file_and_what_are_no_days_is_told_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer =
        json!({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}});
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), "{\"eos_token\": \"a\"}").unwrap();
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    let (root, model) = (folder.path().join("sets"), folder.path().to_str().unwrap());
    let root = root.to_str().unwrap();
    let link = folder.path().join("link.jsonl");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    for (path, told) in [
        ("/dev/null", "/dev/null is no ordinary file and no folder"),
        (link.to_str().unwrap(), "is a link to what does not exist"),
        ("none.jsonl", "none.jsonl does not exist"),
    ] {
        let store = format!("data.store=\"{root}\"");
        let (code, _, err) = run(&["prepare", "--model", model, "--data", path, "--set", &store]);
        assert!(code == 2 && err.contains(told), "{path}: {err}");
    }
    for days in ["nan", "-1", "inf"] {
        let (code, out, err) = run(&["prune", "--store", root, &format!("--older-than={days}")]);
        assert!(code == 2 && out.is_empty() && err.contains("not a number of days"), "{days}: {err}");
    }
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
