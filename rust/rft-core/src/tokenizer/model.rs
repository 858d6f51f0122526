//! tokenizer.json, as far as the fast engine reads it.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::cut::Scheme;

/// An added token.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Added {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub content: String,
    /// Whether it must not touch a letter, digit, mark or connector.
    pub single_word: bool,
    /// Whether it takes the white space before it.
    pub lstrip: bool,
    /// Whether it takes the white space behind it.
    pub rstrip: bool,
    /// Whether it is looked for after normalisation.
    pub normalized: bool,
    /// Whether it is a control token.
    pub special: bool,
}

/// A Unicode form that a text is brought to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As it is.
    None,
    /// NFC.
    Nfc,
    /// NFKC.
    Nfkc,
}

/// What stands for a space at the start of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefix {
    /// Nothing is put before a text.
    Never,
    /// A space before every stretch of text between added tokens.
    Always,
    /// The same, unless one stands there.
    Missing,
    /// The same, only where the stretch begins the text.
    MissingFirst,
}

/// What of a tokenizer.json the fast engine needs.
pub struct Plan<'a> {
    /// The added tokens, with the ids that the library gives them.
    pub added: Vec<Added>,
    /// The normalizer and pre-tokenizer as the file has them.
    pub steps: (Value, Value),
    /// The form of the text.
    pub form: Form,
    /// The split pattern.
    pub scheme: Scheme,
    /// Space put before a text; only for [`Scheme::Spaces`].
    pub prefix: Prefix,
    /// The BPE model.
    pub model: Model<'a>,
}

/// A model of type BPE.
#[derive(Deserialize)]
pub struct Model<'a> {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    /// Whether a piece that is in the vocabulary is that token, merges or not.
    #[serde(default)]
    pub ignore_merges: bool,
    /// Tokens and ids.
    #[serde(borrow)]
    pub vocab: Vocab<'a>,
    /// Pairs, by rank.
    #[serde(borrow, default)]
    pub merges: Merges<'a>,
}

#[derive(Deserialize)]
struct File<'a> {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(borrow)]
    model: Model<'a>,
}

impl<'a> Plan<'a> {
    /// From a tokenizer.json; else why the fast engine cannot run it, in words that follow "because".
    pub fn read(json: &'a str) -> Result<Plan<'a>, String> {
        let file: File<'a> = serde_json::from_str(json).map_err(|e| format!("its file has another shape ({e})"))?;
        let model = file.model;
        match model.kind.as_deref() {
            Some("BPE") => {}
            None if !model.merges.0.is_empty() => {}
            other => return Err(format!("its model is {}", other.unwrap_or("of an unnamed type"))),
        }
        if model.dropout.is_some_and(|dropout| dropout != 0.0) {
            return Err("its BPE has dropout".to_string());
        }
        let given = |affix: &Option<String>| affix.as_deref().is_some_and(|affix| !affix.is_empty());
        if given(&model.continuing_subword_prefix) || given(&model.end_of_word_suffix) {
            return Err("its BPE marks the parts of a word".to_string());
        }
        let steps = flatten(&file.normalizer, "normalizers");
        let cuts = flatten(&file.pre_tokenizer, "pretokenizers");
        let (form, scheme, prefix) = if model.byte_fallback {
            if model.ignore_merges {
                return Err("its BPE has byte_fallback and ignore_merges".to_string());
            }
            let (scheme, prefix) = sentencepiece(&steps, &cuts)?;
            (Form::None, scheme, prefix)
        } else {
            (form_of(&steps)?, byte_level(&cuts)?, Prefix::Never)
        };
        let added = numbered(file.added_tokens, &model)?;
        Ok(Plan { added, steps: (file.normalizer, file.pre_tokenizer), form, scheme, prefix, model })
    }
}

/// Added tokens as the library numbers them: by the vocabulary, else on from its size, in the file's order. The ids in
/// the file count for nothing.
fn numbered(mut tokens: Vec<Added>, model: &Model<'_>) -> Result<Vec<Added>, String> {
    let wanted: HashSet<&str> = tokens.iter().map(|token| token.content.as_str()).collect();
    if wanted.len() != tokens.len() || wanted.contains("") {
        return Err("its added tokens are not distinct".to_string());
    }
    let known: HashMap<&str, u32> = model
        .vocab
        .0
        .iter()
        .filter(|(token, _)| wanted.contains(token.as_ref()))
        .map(|(token, id)| (token.as_ref(), *id))
        .collect();
    let mut next = model.vocab.0.len() as u32;
    for token in &mut tokens {
        let id = known.get(token.content.as_str()).copied().unwrap_or_else(|| {
            next += 1;
            next - 1
        });
        token.id = id;
    }
    Ok(tokens)
}

/// The parts of a sequence, those of nested ones in place; nothing for null.
fn flatten<'v>(value: &'v Value, key: &str) -> Vec<&'v Value> {
    match (&value["type"], &value[key]) {
        (Value::Null, _) => Vec::new(),
        (_, Value::Array(parts)) => parts.iter().flat_map(|part| flatten(part, key)).collect(),
        _ => vec![value],
    }
}

fn kind(value: &Value) -> &str {
    value["type"].as_str().unwrap_or_default()
}

fn form_of(steps: &[&Value]) -> Result<Form, String> {
    match steps {
        [] => Ok(Form::None),
        [one] if kind(one) == "NFC" => Ok(Form::Nfc),
        [one] if kind(one) == "NFKC" => Ok(Form::Nfkc),
        _ => {
            let names: Vec<&str> = steps.iter().map(|step| kind(step)).collect();
            Err(format!("its normalizer is {}", names.join(", ")))
        }
    }
}

fn byte_level(cuts: &[&Value]) -> Result<Scheme, String> {
    let Some((last, before)) = cuts.split_last().filter(|(last, _)| kind(last) == "ByteLevel") else {
        let names: Vec<&str> = cuts.iter().map(|cut| kind(cut)).collect();
        return Err(format!("its pre-tokenizer is {}, without ByteLevel at the end", names.join(", ")));
    };
    // The library's defaults are true.
    let flag = |key: &str| last[key].as_bool().unwrap_or(true);
    if flag("add_prefix_space") {
        return Err("its ByteLevel adds a space before each text".to_string());
    }
    let gpt2 = flag("use_regex");
    match before {
        [] if !gpt2 => Ok(Scheme::Whole),
        [] if gpt2 => Ok(Scheme::Gpt2 { digits: false }),
        [digits] if gpt2 && kind(digits) == "Digits" && digits["individual_digits"] == Value::Bool(true) => {
            Ok(Scheme::Gpt2 { digits: true })
        }
        splits if !gpt2 && !splits.is_empty() => {
            let patterns: Option<Vec<&str>> = splits
                .iter()
                .map(|split| {
                    let plain = kind(split) == "Split"
                        && split["behavior"] == "Isolated"
                        && split["invert"] != Value::Bool(true);
                    split["pattern"]["Regex"].as_str().filter(|_| plain)
                })
                .collect();
            let unknown = || "its split pattern is none that the engine knows".to_string();
            Scheme::of_patterns(&patterns.ok_or_else(unknown)?).ok_or_else(unknown)
        }
        _ => Err("its pre-tokenizer is none that the engine knows".to_string()),
    }
}

/// U+2581, which stands for a space.
pub const SPACE_MARK: &str = "\u{2581}";

fn sentencepiece(steps: &[&Value], cuts: &[&Value]) -> Result<(Scheme, Prefix), String> {
    let replaces =
        |step: &Value| kind(step) == "Replace" && step["pattern"]["String"] == " " && step["content"] == SPACE_MARK;
    let prepends = |step: &Value| kind(step) == "Prepend" && step["prepend"] == SPACE_MARK;
    let newlines = |cut: &Value| {
        kind(cut) == "Split"
            && cut["pattern"]["Regex"] == "\n+"
            && cut["behavior"] == "Isolated"
            && cut["invert"] != Value::Bool(true)
    };
    // Splitting at a space that is now a mark cuts nothing.
    let idle = |cut: &Value| kind(cut) == "Split" && cut["pattern"]["String"] == " ";
    let prefix = match steps {
        [replace] if replaces(replace) => Some(Prefix::Never),
        [prepend, replace] if prepends(prepend) && replaces(replace) => Some(Prefix::Always),
        [] => None,
        _ => {
            let names: Vec<&str> = steps.iter().map(|step| kind(step)).collect();
            return Err(format!("its normalizer is {}", names.join(", ")));
        }
    };
    match (prefix, cuts) {
        (Some(prefix), []) => Ok((Scheme::Spaces { newlines: false }, prefix)),
        (Some(prefix), [one]) if newlines(one) => Ok((Scheme::Spaces { newlines: true }, prefix)),
        (Some(prefix), [one]) if idle(one) => Ok((Scheme::Spaces { newlines: false }, prefix)),
        (None, [one]) if kind(one) == "Metaspace" && one["replacement"] == SPACE_MARK => {
            if one["split"].as_bool().unwrap_or(true) {
                return Err("its Metaspace splits".to_string());
            }
            let prefix = match one["prepend_scheme"].as_str() {
                Some("never") => Prefix::Never,
                Some("first") => Prefix::MissingFirst,
                Some("always") | None => Prefix::Missing,
                Some(other) => return Err(format!("its Metaspace prepends {other:?}")),
            };
            Ok((Scheme::Spaces { newlines: false }, prefix))
        }
        _ => Err("its pre-tokenizer is none that the engine knows".to_string()),
    }
}

/// A string, borrowed from the file where it has no escapes.
pub struct Text<'a>(pub Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Strings;
        impl<'de> Visitor<'de> for Strings {
            type Value = Text<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E>(self, value: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(value)))
            }
            fn visit_str<E>(self, value: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(value.to_string())))
            }
        }
        deserializer.deserialize_str(Strings)
    }
}

/// Tokens and ids in the file's order; empty where the model holds them in another shape.
pub struct Vocab<'a>(pub Vec<(Cow<'a, str>, u32)>);

impl<'de: 'a, 'a> Deserialize<'de> for Vocab<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Vocab<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vocabulary")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some((token, id)) = map.next_entry::<Text<'de>, u32>()? {
                    entries.push((token.0, id));
                }
                Ok(Vocab(entries))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Vocab(Vec::new()))
            }
        }
        deserializer.deserialize_any(Entries)
    }
}

/// Pairs by rank.
#[derive(Default)]
pub struct Merges<'a>(pub Vec<(Cow<'a, str>, Cow<'a, str>)>);

struct Merge<'a>(Cow<'a, str>, Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Merge<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pair;
        impl<'de> Visitor<'de> for Pair {
            type Value = Merge<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a pair of tokens, or two with a space between")
            }
            fn visit_borrowed_str<E: serde::de::Error>(self, value: &'de str) -> Result<Self::Value, E> {
                // The library wants exactly two parts.
                match value.split_once(' ') {
                    Some((left, right)) if !right.contains(' ') => Ok(Merge(left.into(), right.into())),
                    _ => Err(E::custom("a merge is no pair")),
                }
            }
            fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Self::Value, E> {
                match value.split_once(' ') {
                    Some((left, right)) if !right.contains(' ') => {
                        Ok(Merge(left.to_string().into(), right.to_string().into()))
                    }
                    _ => Err(E::custom("a merge is no pair")),
                }
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let short = || serde::de::Error::custom("a merge is no pair");
                let left = seq.next_element::<Text<'de>>()?.ok_or_else(short)?;
                let right = seq.next_element::<Text<'de>>()?.ok_or_else(short)?;
                if seq.next_element::<IgnoredAny>()?.is_some() {
                    return Err(short());
                }
                Ok(Merge(left.0, right.0))
            }
        }
        deserializer.deserialize_any(Pair)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Merges<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Merges<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of merges")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut merges = Vec::new();
                while let Some(Merge(left, right)) = seq.next_element()? {
                    merges.push((left, right));
                }
                Ok(Merges(merges))
            }
        }
        deserializer.deserialize_seq(All)
    }
}
