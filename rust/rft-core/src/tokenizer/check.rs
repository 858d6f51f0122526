//! The self-check at load: the fast engine against the library, on text that is hard to cut.

use std::hash::Hasher;

use memchr::memmem;
use serde_json::{Map, Value, json};

use super::Encoded;
use super::bpe::{Fold, FoldMap};
use super::cut::Scheme;
use super::engine::{Engine, Places, Sink};
use super::model::Plan;
use super::normal::normalise;
use super::slow::Slow;

/// Words, signs, spaces, marks, digits and scripts that split patterns and merges stumble over.
const PARTS: &[&str] = &[
    "the",
    "Quick",
    "brown",
    "FOX",
    "don't",
    "I'LL",
    "we'Re",
    "'s",
    "''s",
    "'\u{17f}",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " \n ",
    "\u{a0}",
    "\u{3000}",
    "\u{2028}",
    "1",
    "23",
    "4567",
    "\u{bd}",
    "\u{664}",
    "!",
    "?!",
    "...",
    "/",
    "//\n",
    "_x",
    "::",
    "->",
    "(foo",
    " (bar",
    "<|im_end|>",
    "</s>",
    "<s>",
    "e\u{301}",
    "\u{301}",
    "\u{e9}",
    "\u{df}",
    "\u{4e16}\u{754c}",
    "\u{3053}\u{3093}\u{306b}\u{3061}\u{306f}",
    "\u{30fb}",
    "\u{41f}\u{440}\u{438}\u{432}\u{435}\u{442}",
    "\u{939}\u{93f}\u{928}\u{94d}\u{926}\u{940}",
    "\u{645}\u{631}\u{62d}\u{628}\u{627}",
    "\u{e20}\u{e32}\u{e29}\u{e32}",
    "\u{d55c}\u{ad6d}\u{c5b4}",
    "\u{1f600}",
    "\u{2764}\u{fe0f}",
    "\u{1f469}\u{200d}\u{1f680}",
    "\u{200b}",
    "\u{feff}",
    "\u{0}",
    "\u{7f}",
    "\u{2581}",
    "\u{2581}x",
    "=",
    "====",
    "aaaaaaaa",
    "helloWorldFOOBar",
    "XMLHttpRequest2",
    "\u{1c5}a",
    "\u{2160}",
    "\u{1d573}",
    "\u{b7}",
    "\u{10ffff}",
    "{\"a\": [1, 2]}",
    "    return x\n",
    "https://example.com/a?b=c&d=%20",
    "\u{1100}\u{1161}\u{11a8}",
    "\u{212b}",
    "\u{fb01}",
    "A\u{327}\u{30a}",
    "\u{f1}",
    "\u{4}\u{6}",
];

/// How many texts of parts are compared.
const TEXTS: usize = 120;

/// The texts that are compared.
fn texts() -> Vec<String> {
    let mut seed = 0x2545_f491_4f6c_dd1du64;
    let mut next = |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 33) as usize % below
    };
    let mut texts: Vec<String> = PARTS.iter().map(ToString::to_string).collect();
    for _ in 0..TEXTS {
        let mut text = String::new();
        for _ in 0..12 {
            text.push_str(PARTS[next(PARTS.len())]);
            if next(3) == 0 {
                text.push(' ');
            }
        }
        texts.push(text);
    }
    texts
}

/// A set of hashes that says "held" too often, of a hundred that are not about once: half a million parts of texts take a
/// hash table longer than all of the library's loading.
struct Parts(Vec<u64>);

impl Default for Parts {
    fn default() -> Parts {
        Parts(vec![0; 1 << (Parts::BITS - 6)])
    }
}

impl Parts {
    const BITS: u32 = 23;

    fn places(hash: u64) -> [usize; 2] {
        let mixed = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        [mixed >> (64 - Parts::BITS), mixed >> (64 - 2 * Parts::BITS) & ((1 << Parts::BITS) - 1)].map(|at| at as usize)
    }

    fn insert(&mut self, hash: u64) {
        Parts::places(hash).into_iter().for_each(|at| self.0[at / 64] |= 1 << (at % 64));
    }

    fn contains(&self, hash: u64) -> bool {
        Parts::places(hash).into_iter().all(|at| self.0[at / 64] >> (at % 64) & 1 == 1)
    }
}

/// The same tokenizer for the library with only those tokens that the texts can hold, which loads in no time. On these
/// texts it gives what the whole file gives: every token that BPE makes on the way is a part of the text.
fn small(plan: &Plan<'_>) -> Value {
    // Parts of the texts by hash: a token that is none of them by chance does no harm.
    const LONGEST: usize = 24;
    let byte_level = !matches!(plan.scheme, Scheme::Spaces { .. });
    let letters = super::bpe::letters_of_bytes();
    let mut parts = Parts::default();
    let hash = |bytes: &[u8]| {
        let mut fold = Fold::default();
        fold.write(bytes);
        fold.finish() ^ (bytes.len() as u64) << 56
    };
    let mut whole = String::new();
    for text in texts() {
        let normal = normalise(&text, plan.form).map_or(text, |normal| normal.text);
        if byte_level {
            whole.extend(normal.bytes().map(|byte| letters[usize::from(byte)]));
        } else {
            whole.push('\u{2581}');
            whole.extend(normal.chars().map(|c| if c == ' ' { '\u{2581}' } else { c }));
        }
        whole.push('\n');
    }
    let bytes = whole.as_bytes();
    for start in 0..bytes.len() {
        for end in start + 1..=(start + LONGEST).min(bytes.len()) {
            parts.insert(hash(&bytes[start..end]));
        }
    }
    let content: FoldMap<&str, ()> = plan.added.iter().map(|token| (token.content.as_str(), ())).collect();
    let held = |token: &str| {
        if token.len() > LONGEST {
            return memmem::find(bytes, token.as_bytes()).is_some();
        }
        let short = token.chars().nth(1).is_none() || token.starts_with("<0x");
        short || parts.contains(hash(token.as_bytes()))
    };
    let mut vocab: Map<String, Value> = Map::new();
    for (token, id) in
        plan.model.vocab.0.iter().filter(|(token, _)| content.contains_key(token.as_ref()) || held(token))
    {
        vocab.insert(token.to_string(), Value::from(*id));
    }
    for token in &plan.added {
        vocab.entry(token.content.clone()).or_insert(Value::from(token.id));
    }
    let mut joined = String::new();
    let merges = plan.model.merges.0.iter().filter(|(left, right)| {
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        held(&joined)
            && vocab.contains_key(left.as_ref())
            && vocab.contains_key(right.as_ref())
            && vocab.contains_key(&joined)
    });
    let merges: Vec<[&str; 2]> = merges.map(|(left, right)| [left.as_ref(), right.as_ref()]).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": plan.added, "normalizer": plan.steps.0,
        "pre_tokenizer": plan.steps.1, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": !byte_level,
            "ignore_merges": plan.model.ignore_merges, "vocab": vocab, "merges": merges},
    })
}

/// The texts, and what the library makes of them.
pub fn wanted(plan: &Plan<'_>) -> Result<Vec<(String, Encoded)>, String> {
    let slow = Slow::new(&small(plan).to_string()).map_err(|e| e.problem)?;
    texts().into_iter().map(|text| slow.encode(&text).map(|wanted| (text, wanted)).map_err(|e| e.problem)).collect()
}

/// Why the fast engine is not to be used, if it is not.
pub fn check(fast: &Engine, wanted: &[(String, Encoded)]) -> Result<(), String> {
    let mut scratch = fast.scratch();
    for (text, wanted) in wanted {
        let mut given = Encoded::default();
        let mut sink = Sink { ids: &mut given.ids, places: Places::Spans(&mut given.offsets) };
        fast.encode(text, false, &mut scratch, &mut sink, &mut |_| {});
        if given != *wanted {
            return Err(format!("the self-check at load found other ids for {text:?}"));
        }
    }
    Ok(())
}
