//! The corpus that the fuzzer keeps (`fuzz/corpus`), through the same targets: all that it ever reached or broke stays whole.

use std::path::Path;

#[path = "../../fuzz/targets.rs"]
mod targets;

fn hold(name: &str, target: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let mut inputs: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    assert!(inputs.len() > 50, "{} inputs", inputs.len());
    for input in inputs {
        let bytes = std::fs::read(&input).unwrap();
        if let Err(panic) = std::panic::catch_unwind(|| target(&bytes)) {
            eprintln!("the input: {}", input.display());
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn rows_of_any_bytes_are_read_or_refused() {
    hold("rows", targets::rows);
}

#[test]
fn a_tokenizer_of_any_bytes_is_loaded_or_refused() {
    hold("tokenizer", targets::tokenizer);
}

#[test]
fn a_template_of_any_bytes_renders_or_fails() {
    hold("template", targets::template);
}

#[test]
fn a_shard_of_any_bytes_opens_whole_or_is_refused() {
    hold("shard", targets::shard);
}
