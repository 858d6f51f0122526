//! Loading: versions of the Unicode tables, threads.

use rft_core::tokenizer::Tokenizer;
use rft_core::tokenizer::unicode::Version;
use serde_json::{Value, json};

use crate::support::{Case, document, tokenizer_json};

/// U+11DB0, a letter since Unicode 17, behind an ASCII one.
const NEW_LETTER: &str = "a\u{11db0}";

/// GPT-2's pattern, and a merge of the letter `a` with the first byte of [`NEW_LETTER`]'s other one.
fn gpt2() -> String {
    let mut file: Value = serde_json::from_str(&tokenizer_json(&[("a", "\u{f0}")])).unwrap();
    file["pre_tokenizer"]["use_regex"] = true.into();
    file.to_string()
}

#[test]
fn split_patterns_read_the_tables_asked_for_on_any_number_of_threads() {
    let cut = vec![97, 0xf0, 0x91, 0xb6, 0xb0];
    let joined = vec![260, 0x91, 0xb6, 0xb0];
    for (version, wanted) in [(Version::V16, cut), (Version::V17, joined)] {
        for threads in [1, 2, 3] {
            let tokenizer = Tokenizer::load(&gpt2(), version, threads).unwrap();
            assert!(tokenizer.engine().fast, "{}", tokenizer.engine().reason);
            assert_eq!(tokenizer.encode_text(NEW_LETTER).unwrap(), wanted, "{version:?}");
        }
    }
}

#[test]
fn other_tables_are_refused_where_the_library_does_the_work() {
    let file = gpt2().replace("\"dropout\":null", "\"dropout\":0.1");
    assert!(!Tokenizer::load(&file, Version::V16, 2).unwrap().engine().fast);
    let error = Tokenizer::load(&file, Version::V17, 2).err().unwrap().to_string();
    assert!(error.contains("dropout") && error.contains("17.0.0") && error.contains("model.unicode"), "{error}");
}

#[test]
fn a_file_that_is_wrong_is_told_of_the_same_way_on_any_number_of_threads() {
    let mut file: Value = serde_json::from_str(&gpt2()).unwrap();
    file["model"]["merges"] = json!([["a", "nothing"]]);
    for threads in [1, 3] {
        let told = Tokenizer::load(&file.to_string(), Version::V16, threads).err().map(|e| e.to_string());
        assert!(told.is_some_and(|told| told.contains("cannot be read")));
    }
}

#[test]
fn a_set_says_which_tables_made_it() {
    let rows = [json!({"text": NEW_LETTER})];
    let case = || Case::new(&rows, "").with_tokenizer("json", gpt2().into());
    let (_, old) = case().made();
    let with_new = case().with_tokenizer("unicode", 17.into());
    let (_, new) = with_new.made();
    assert_ne!(document(&old, 0).0, document(&new, 0).0);
    assert_eq!(document(&new, 0).0[0], 260);
    assert_ne!(old.manifest().key, new.manifest().key);
    assert_eq!(new.manifest().inputs["unicode"], "17.0.0");
    let shard = std::fs::read(with_new.place().join(&new.manifest().shards[0].file)).unwrap();
    assert!(shard[..128].windows(6).any(|bytes| bytes == b"17.0.0"));
    let wrong = case().with_tokenizer("unicode", 18.into()).spec.to_string();
    assert!(rft_core::spec::Spec::parse(&wrong).unwrap_err().to_string().contains("16 and 17"));
}
